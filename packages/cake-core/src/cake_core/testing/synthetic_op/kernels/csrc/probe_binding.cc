// A library without a kernel: the host compiler alone builds it and it runs on a machine without a GPU. It shows that
// the kind of an error thrown in C++ survives the boundary.
#include <stdexcept>
#include <string>

#include "cake/v1/ffi.h"

namespace cake::synthetic {

// Raises the error called `kind` with this text; returns the length of the text for the kind "none".
int64_t probe(const std::string& kind, const std::string& text) {
  if (kind == "ValueError") TVM_FFI_THROW(ValueError) << text;
  if (kind == "TypeError") TVM_FFI_THROW(TypeError) << text;
  if (kind == "RuntimeError") TVM_FFI_THROW(RuntimeError) << text;
  if (kind == "NotImplementedError") TVM_FFI_THROW(NotImplementedError) << text;
  if (kind == "std::invalid_argument") throw std::invalid_argument(text);
  if (kind != "none") TVM_FFI_THROW(ValueError) << "kind is '" << kind << "'; needs the name of an error or 'none'";
  return static_cast<int64_t>(text.size());
}

}  // namespace cake::synthetic

CAKE_EXPORT_RUN(cake::synthetic::probe);
