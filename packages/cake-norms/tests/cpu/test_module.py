"""ZeroCenteredRMSNorm: allocation, state, sequence parallelism."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from cake_norms.rmsnorm import ZeroCenteredRMSNorm


def norm_of(weight_value: float, hidden: int = 64) -> ZeroCenteredRMSNorm:
    module = ZeroCenteredRMSNorm(hidden, device="cpu", dtype=torch.float32)
    torch.nn.init.constant_(module.weight, weight_value)
    return module


def test_a_fresh_module_normalises_and_nothing_else() -> None:
    """The weight is stored around zero: a fresh module computes n, not 0 and not 2n."""
    x = torch.randn(5, 64)
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(ZeroCenteredRMSNorm(64, device="cpu")(x), n)


def test_the_offset_is_added_once() -> None:
    x = torch.randn(5, 64)
    torch.testing.assert_close(norm_of(1.0)(x), 2 * norm_of(0.0)(x))


def test_a_weight_below_half_a_bfloat16_ulp_of_one_still_counts() -> None:
    """1 + w is never formed in BF16, where 2^-9 would vanish."""
    x = torch.randn(64, 64).bfloat16()
    module = ZeroCenteredRMSNorm(64, device="cpu", dtype=torch.bfloat16)
    before = module(x)
    torch.nn.init.constant_(module.weight, 2**-9)
    assert not torch.equal(before, module(x))


def test_the_weight_is_the_only_state() -> None:
    module = ZeroCenteredRMSNorm(64, device="cpu")
    assert list(module.state_dict()) == ["weight"]
    assert module.weight.shape == (64,)
    assert not module.weight.any()
    assert module.extra_repr().replace(" ", "") in ("hidden_size=64,eps=1e-06", "64,eps=1e-06")


def test_the_default_dtype_is_torchs() -> None:
    assert ZeroCenteredRMSNorm(64, device="cpu").weight.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ZeroCenteredRMSNorm(64, device="cpu").weight.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_allocates_where_factory_functions_do() -> None:
    with torch.device("meta"):
        assert ZeroCenteredRMSNorm(64).weight.device.type == "meta"
        assert ZeroCenteredRMSNorm(64, device="cpu").weight.device.type == "cpu", "the argument beats the default"
    for device in ("meta", "cpu"):
        torch.set_default_device(device)
        try:
            assert ZeroCenteredRMSNorm(64).weight.device.type == device
        finally:
            torch.set_default_device(None)


def test_torch_still_tells_whether_a_default_device_is_set() -> None:
    """Default-device detection asks a private mode stack of torch; a rename must fail loudly, not fall back."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    assert not any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    with torch.device("meta"):
        assert any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def test_meta_and_cpu_construction_touch_no_cuda() -> None:
    """A process that sees no device builds both; CUDA stays uninitialised and nothing is compiled or loaded."""
    program = (
        "import sys, torch\n"
        "from cake_norms.rmsnorm import ZeroCenteredRMSNorm\n"
        "def refuse(*a, **k): raise AssertionError('asked CUDA')\n"
        "torch._C._cuda_init = refuse; torch.cuda.current_device = refuse; torch.cuda.get_device_capability = refuse\n"
        "ZeroCenteredRMSNorm(64, device='meta'); ZeroCenteredRMSNorm(64, device='cpu')\n"
        "assert not torch.cuda.is_initialized() and 'tvm_ffi' not in sys.modules\n"
    )
    subprocess.run((sys.executable, "-c", program), check=True)


@pytest.mark.parametrize("hidden", [4, 12, 16392, 0, -8])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_unserved_width_is_refused_on_every_device(hidden: int, device: str) -> None:
    """A model built on meta fails when it is built, not at its first step."""
    with pytest.raises(ValueError, match="hidden_size") as caught:
        ZeroCenteredRMSNorm(hidden, device=device)
    assert str(hidden) in str(caught.value)


@pytest.mark.parametrize(("hidden", "eps"), [(True, 1e-6), ("64", 1e-6), (64, "1e-6"), (64, True)])
def test_arguments_of_another_type_are_type_errors(hidden: object, eps: object) -> None:
    with pytest.raises(TypeError):
        ZeroCenteredRMSNorm(hidden, eps, device="cpu")


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_eps_must_be_finite_and_not_negative(eps: float) -> None:
    with pytest.raises(ValueError, match="eps"):
        ZeroCenteredRMSNorm(64, eps, device="cpu")


def test_a_float16_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        ZeroCenteredRMSNorm(64, device="cpu", dtype=torch.float16)


def test_reset_after_to_empty_writes_zeros() -> None:
    """Memory of a materialised meta module is garbage until reset_parameters."""
    with torch.device("meta"):
        module = ZeroCenteredRMSNorm(64)
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.weight.fill_(float("nan"))
    module.reset_parameters()
    assert torch.equal(module.weight, torch.zeros(64))
    assert module.weight.requires_grad


@pytest.mark.parametrize("choice", [True, False])
def test_sequence_parallel_marks_the_weight_and_survives(choice: bool) -> None:
    module = ZeroCenteredRMSNorm(64, device="meta", sequence_parallel=choice)
    assert module.weight.sequence_parallel is choice
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.weight.sequence_parallel is choice
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin.reset_parameters()
        assert twin.weight.sequence_parallel is choice
        assert twin.eps == module.eps


def test_reset_marks_a_parameter_that_to_empty_replaced() -> None:
    module = ZeroCenteredRMSNorm(64, device="meta", sequence_parallel=True)
    module.weight = torch.nn.Parameter(torch.empty(64))
    module.reset_parameters()
    assert module.weight.sequence_parallel is True


def test_without_a_choice_the_mark_is_the_callers() -> None:
    module = ZeroCenteredRMSNorm(64, device="cpu")
    assert not hasattr(module.weight, "sequence_parallel")
    module.reset_parameters()
    assert not hasattr(module.weight, "sequence_parallel")
    module.weight.sequence_parallel = True
    module.reset_parameters()
    assert module.weight.sequence_parallel is True


def test_a_trainers_rule_selects_exactly_the_marked_weights() -> None:
    """The rule of tensor-parallel trainers, restated: all-reduce gradients of parameters that say sequence_parallel."""
    model = torch.nn.ModuleDict(
        {
            "marked": ZeroCenteredRMSNorm(64, device="cpu", sequence_parallel=True),
            "unmarked": ZeroCenteredRMSNorm(64, device="cpu", sequence_parallel=False),
            "none": ZeroCenteredRMSNorm(64, device="cpu"),
        }
    )
    chosen = [name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
    assert chosen == ["marked.weight"]


def test_eps_and_weights_survive_pickle_and_checkpoints() -> None:
    module = norm_of(0.25)
    module.eps = 1e-5
    x = torch.randn(3, 64)
    twin = pickle.loads(pickle.dumps(module))
    assert torch.equal(twin(x), module(x))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = ZeroCenteredRMSNorm(64, 1e-5, device="cpu")
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(x), module(x))


def test_a_plain_weight_becomes_a_zero_centred_one_by_subtracting_one() -> None:
    """Checkpoints: a stored plain weight g is w = g - 1 here."""
    g = torch.rand(64) + 0.5
    x = torch.randn(7, 64)
    module = norm_of(0.0)
    with torch.no_grad():
        module.weight.copy_(g - 1)
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (64,), g, 1e-6))


def test_a_float64_module_is_served_on_the_cpu() -> None:
    module = norm_of(0.5).to(torch.float64)
    x = torch.randn(4, 64, dtype=torch.float64, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad.dtype == torch.float64
    assert x.grad.dtype == torch.float64
