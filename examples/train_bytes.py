"""Train a byte-level transformer whose norms are Cake's on real text: by default the Python standard library itself.

    python examples/train_bytes.py                                 # two to three minutes on two CPU cores
    python examples/train_bytes.py --device cuda --variant fast --steps 3000 --plot loss.svg

Every block normalises its input with ``ZeroCenteredRMSNorm`` and its attention output, head by head, with
``rmsnorm_silu_gate``: the gate is one more slice of the fused projection and is read in place. Attention itself is
torch's. Two ``det`` runs with one seed, device and thread count end with the same SHA-256 of all weights. (On the CPU
Cake's ops have the same bits with any number of threads; whether torch's products do is up to torch.)

With ``--conv``, q, k and v first pass ``causal_conv1d``, as in front of a linear attention: three earlier bytes and the
current one, weighted channel by channel, then SiLU. Each file, or the part of it in a window, is then a document:
neither convolution nor attention reads across a boundary, so moving one boundary changes the SHA-256.

With ``--layers gdn,gdn,gdn,attention`` the model is a hybrid: a block named gdn mixes its tokens with a gated delta
rule (``chunk_gated_delta_rule``) behind a short convolution of q, k and v, its decay and beta come from the same fused
projection, and its output is normalised and gated head by head. Instead of all earlier bytes it keeps one 128 x 128
matrix a head. A block named gqa is the attention of such models: two query heads of 256 channels share a key head
(``varlen_gqa_attention``), and a quarter of the channels has rotary positions. Files are documents as with ``--conv``.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# OpenMP reads it when torch loads. With threads that spin while they wait, other work slows the training several times.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from cake_conv1d import causal_conv1d
from cake_core import configure
from cake_core.device import device_arch
from cake_gdn import chunk_gated_delta_rule, packed_qkv_views
from cake_gdn import is_supported as gdn_is_supported
from cake_gqa import is_supported as gqa_is_supported
from cake_gqa import varlen_gqa_attention
from cake_norms.gated_rmsnorm import rmsnorm_silu_gate
from cake_norms.rmsnorm import ZeroCenteredRMSNorm
from torch import Tensor, nn

WIDTH, HEAD_DIM, LAYERS, CONTEXT, BATCH, TAPS = 128, 64, 4, 256, 4, 4
KEY_HEADS, VALUE_HEADS, STATE_DIM = 1, 2, 128  # of a gdn block; two value heads share q and k
GQA_HEADS, GQA_KEY_HEADS, GQA_DIM = 2, 1, 256  # of a gqa block
MIXERS = ("attention", "gdn", "gqa")
END = 0  # with --conv, a gdn or a gqa block: the byte between two documents
LEARNING_RATE, WARMUP = 4e-3, 30
HELD_OUT_SHARE = 16  # one file in 16 is never trained on


# ---------------------------------------------------------------------------------------------------------- text


def read_text(path: Path | None, separator: bytes = b"\n") -> tuple[bytes, bytes]:
    """(training bytes, held-out bytes), files joined by ``separator``. Of a folder whole files are held out, chosen by
    a hash of their names; of a single file the last sixteenth. Raises: ValueError when there is too little text."""
    folder = Path(sysconfig.get_path("stdlib")) if path is None else path
    if folder.is_file():
        data = folder.read_bytes()
        cut = len(data) - len(data) // HELD_OUT_SHARE
        parts = (data[:cut], data[cut:])
    else:
        skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        names = sorted(
            name.as_posix()
            for file in folder.rglob("*.py" if path is None else "*")
            if file.is_file() and not skipped.intersection((name := file.relative_to(folder)).parts)
        )
        kept: tuple[list[bytes], list[bytes]] = ([], [])
        for name in names:
            held = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0
            kept[held].append((folder / name).read_bytes())
        parts = (separator.join(kept[0]), separator.join(kept[1]))
    if min(map(len, parts)) <= CONTEXT:
        raise ValueError(f"{folder}: {len(parts[0])} training and {len(parts[1])} held-out bytes; needs {CONTEXT + 1}")
    return parts


def unigram_entropy(data: Tensor) -> float:
    """Bits per byte of the best model that knows only how often each byte occurs in ``data``."""
    share = torch.bincount(data.long(), minlength=256).double() / data.numel()
    return float(-(share * share.clamp_min(1e-30).log2()).sum())


def windows(data: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets [len(starts), CONTEXT] int64 that begin at ``starts``."""
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


class Documents(NamedTuple):
    """The documents of a batch: one begins with each row and after each END."""

    cu_seqlens: Tensor  # [documents + 1] int32: 0, then where each one ends when the rows are laid back to back
    mask: Tensor  # [batch, 1, length, length] bool: what attention may read, the earlier bytes of the same document


def documents(tokens: Tensor) -> Documents:
    """The documents of tokens [batch, length]."""
    begins = F.pad(tokens[:, :-1] == END, (1, 0), value=True)
    cu_seqlens = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=tokens.numel())
    number = begins.cumsum(1)
    mask = (number[:, :, None] == number[:, None, :]).tril()
    return Documents(cu_seqlens.int(), mask[:, None])


# --------------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal attention with rotary positions; its output is normalised and gated per head. With ``conv``, a short
    convolution over time of q, k and v comes first."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.conv = conv
        self.project = nn.Linear(WIDTH, 4 * WIDTH, bias=False)  # [q | k | v | gate]
        self.norm_weight = nn.Parameter(torch.ones(HEAD_DIM))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        if conv:
            self.taps = nn.Parameter(torch.empty(3 * WIDTH, TAPS))  # the last one is the current byte's

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, docs: Documents | None) -> Tensor:
        qkv, gate = self.project(x).split((3 * WIDTH, WIDTH), dim=-1)  # views
        if self.conv and docs is not None:  # the rows laid back to back are read in place, a slice of the projection
            qkv = causal_conv1d(qkv.flatten(0, 1), self.taps, docs.cu_seqlens).view_as(qkv)
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)  # [batch, length, heads, HEAD_DIM] views
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        mask = None if docs is None else docs.mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)
        gate = gate.unflatten(-1, (-1, HEAD_DIM))
        y = rmsnorm_silu_gate(y.flatten(0, 1), gate.flatten(0, 1), self.norm_weight)
        return self.out(y.view(x.shape))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, length, heads, HEAD_DIM]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GatedDelta(nn.Module):
    """The gated delta rule: a state S [128, 128] a head decays by exp(g), then learns v for the key k, and q reads it.

    q, k and v pass a short convolution over time; the norms of q and k are the op's. Output rows are normalised and
    gated like those of attention."""

    SIZES = (
        (2 * KEY_HEADS + VALUE_HEADS) * STATE_DIM,  # q, k, v
        VALUE_HEADS * STATE_DIM,  # gate
        VALUE_HEADS,  # beta
        VALUE_HEADS,  # decay
    )

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, sum(self.SIZES), bias=False)
        self.taps = nn.Parameter(torch.empty(self.SIZES[0], TAPS))
        self.norm_weight = nn.Parameter(torch.ones(STATE_DIM))
        self.out = nn.Linear(VALUE_HEADS * STATE_DIM, WIDTH, bias=False)
        # g = -A softplus(a + bias): A in (1, 16), softplus(bias) in (0.001, 0.1), both as in Mamba-2.
        self.A_log = nn.Parameter(torch.empty(VALUE_HEADS).uniform_(1, 16).log())
        step = torch.empty(VALUE_HEADS).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, docs: Documents | None) -> Tensor:
        assert docs is not None
        qkv, gate, beta, decay = self.project(x).flatten(0, 1)[None].split(self.SIZES, dim=-1)  # views [1, tokens, .]
        qkv = causal_conv1d(qkv, self.taps, docs.cu_seqlens)
        q, k, v = packed_qkv_views(qkv, num_qk_heads=KEY_HEADS, num_v_heads=VALUE_HEADS)
        y, _ = chunk_gated_delta_rule(
            q,
            k,
            v,
            decay,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            cu_seqlens=docs.cu_seqlens,
            plan="serial",  # a document's bits are then its own, whatever else is in the batch
        )
        y = rmsnorm_silu_gate(y[0], gate[0].unflatten(-1, (-1, STATE_DIM)), self.norm_weight)
        return self.out(y.flatten(-2).view(*x.shape[:-1], -1))


class GroupedAttention(nn.Module):
    """Causal attention whose query heads share a key head, documents packed; normalised and gated like the others."""

    SIZES = (
        (GQA_HEADS + 2 * GQA_KEY_HEADS) * GQA_DIM,  # q, k, v
        GQA_HEADS * GQA_DIM,  # gate
    )

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, sum(self.SIZES), bias=False)
        self.norm_weight = nn.Parameter(torch.ones(GQA_DIM))
        self.out = nn.Linear(GQA_HEADS * GQA_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, docs: Documents | None) -> Tensor:
        assert docs is not None
        qkv, gate = self.project(x).split(self.SIZES, dim=-1)  # views
        qk, v = qkv.unflatten(-1, (-1, GQA_DIM)).split((GQA_HEADS + GQA_KEY_HEADS, GQA_KEY_HEADS), dim=2)
        qk = torch.cat((rotate(qk[..., :HEAD_DIM], cos, sin), qk[..., HEAD_DIM:]), dim=-1).flatten(0, 1)
        q, k = qk.split((GQA_HEADS, GQA_KEY_HEADS), dim=1)
        cu = docs.cu_seqlens
        y = varlen_gqa_attention(q, k, v.flatten(0, 1), cu, cu, max_seqlen_k=CONTEXT)  # v: a slice of the projection
        assert isinstance(y, Tensor)
        y = rmsnorm_silu_gate(y, gate.unflatten(-1, (-1, GQA_DIM)).flatten(0, 1), self.norm_weight)
        return self.out(y.flatten(-2).view(*x.shape[:-1], -1))


def mixer_of(name: str, conv: bool) -> nn.Module:
    """The block part of that name in MIXERS."""
    if name == "gdn":
        return GatedDelta()
    if name == "gqa":
        return GroupedAttention()
    return Attention(conv)


def packs_documents(conv: bool, mixers: Sequence[str]) -> bool:
    """Whether the model reads where documents begin."""
    return conv or any(mixer != "attention" for mixer in mixers)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) with a squared ReLU. The mixer is attention or a gated delta rule."""

    def __init__(self, conv: bool, mixer: str) -> None:
        super().__init__()
        self.attention_norm = ZeroCenteredRMSNorm(WIDTH, device="cpu")
        self.attention = mixer_of(mixer, conv)
        self.mlp_norm = ZeroCenteredRMSNorm(WIDTH, device="cpu")
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, docs: Documents | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, docs)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class ByteModel(nn.Module):
    """Logits [batch, length, 256] of the next byte. Weights are FP32; ``dtype`` is that of the activations."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dtype: torch.dtype, conv: bool, mixers: Sequence[str] = ()) -> None:
        super().__init__()
        mixers = mixers or ("attention",) * LAYERS
        self.dtype, self.reads_documents = dtype, packs_documents(conv, mixers)
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(conv, mixer) for mixer in mixers)
        self.norm = ZeroCenteredRMSNorm(WIDTH, device="cpu")
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                std = 1.0 if weight is self.embed.weight else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std / math.sqrt(2 * len(mixers)) if residual else std)
        nn.init.zeros_(self.head.weight)
        rate = 1000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.arange(CONTEXT)[:, None, None] * rate
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        docs = documents(tokens) if self.reads_documents else None
        # Cake's ops cast nothing: under autocast they take the stream in the dtype of the products.
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embed(tokens).to(self.dtype)
            for block in self.blocks:
                x = block(x, self.cos, self.sin, docs)
            return self.head(self.norm(x))


def bits(model: ByteModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in bits per byte."""
    logits = model(inputs).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


@torch.no_grad()
def held_out_bits(model: ByteModel, data: Tensor, device: torch.device, count: int) -> float:
    """Bits per byte over up to ``count`` windows spread evenly over the held-out text."""
    last = data.numel() - CONTEXT - 1
    starts = torch.linspace(0, last, min(count, last // CONTEXT + 1)).long()
    parts = [bits(model, *windows(data, part, device)).item() * len(part) for part in starts.split(BATCH)]
    return sum(parts) / len(starts)


# ------------------------------------------------------------------------------------------------------ training


@dataclass
class History:
    train: list[float] = field(default_factory=list)  # bits per byte of each step
    held_out: list[tuple[int, float]] = field(default_factory=list)
    unigram: float = 0.0
    tokens_per_second: float = 0.0


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warm = min((step + 1) / WARMUP, 1.0)
    return LEARNING_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(
    model: ByteModel,
    text: Tensor,
    held: Tensor,
    steps: int,
    seed: int,
    device: torch.device,
    report: Callable[[int, float, float], None],
) -> History:
    """Run ``steps`` AdamW steps; ``report(step, bits per byte, tokens per second)`` follows each of them."""
    history = History(unigram=unigram_entropy(held))
    decayed = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(seed)
    busy = 0.0
    for step in range(steps):
        if step % max(steps // 8, 1) == 0:
            history.held_out.append((step, held_out_bits(model, held, device, 32)))
        start = time.perf_counter()
        starts = torch.randint(text.numel() - CONTEXT, (BATCH,), generator=draw)
        loss = bits(model, *windows(text, starts, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.train.append(loss.item())
        busy += time.perf_counter() - start
        history.tokens_per_second = (step + 1) * BATCH * CONTEXT / busy
        report(step + 1, history.train[-1], history.tokens_per_second)
    history.held_out.append((steps, held_out_bits(model, held, device, 256)))
    return history


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over the names and the bytes of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        stored = weight.detach().cpu().contiguous()
        digest.update(f"{name} {stored.dtype} {tuple(stored.shape)}\n".encode())
        digest.update(ctypes.string_at(stored.data_ptr(), stored.nbytes))
    return digest.hexdigest()


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """A progress bar on a terminal, some twenty plain lines elsewhere."""
    if not sys.stdout.isatty():

        def line(step: int, loss: float, speed: float) -> None:
            if step % max(steps // 20, 1) == 0 or step == steps:
                print(f"step {step:5d}/{steps}  {loss:6.3f} bits per byte  {speed:9,.0f} tokens/s", flush=True)

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=steps)
        yield lambda step, loss, speed: bar.update(
            task, completed=step, description=f"{loss:.3f} bits per byte, {speed:,.0f} tokens/s"
        )


def smoothed(values: list[float]) -> list[float]:
    """Means over 4 % of the run around each value, over less at the steep start: they do not lag."""
    half = len(values) // 50 + 1
    parts = (values[i - min(half, i) : i + min(half, i) + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def plot(history: History, title: str, path: Path) -> None:
    """Write the loss curve as an SVG whose text stays text."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    steps = range(1, len(history.train) + 1)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "train_bytes", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        axes.plot(steps, history.train, color="#9db8d2", linewidth=0.8, label="train, each step")
        axes.plot(steps, smoothed(history.train), color="#1f5a91", linewidth=1.8, label="train, smoothed")
        axes.plot(*zip(*history.held_out, strict=True), "o", color="#c4501b", label="held out", clip_on=False)
        axes.axhline(history.unigram, color="#555555", linestyle="--", linewidth=1.2, label="byte frequencies alone")
        end = history.held_out[-1]  # its number stands right of the axes, where nothing is drawn
        axes.annotate(f"{end[1]:.2f}", end, (7, 0), textcoords="offset points", va="center", color="#c4501b")
        axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None), xlim=(0, end[0]))
        axes.set_title(title, parse_math=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


# --------------------------------------------------------------------------------------------------- command line


def layers(text: str) -> tuple[str, ...]:
    """The mixers of a comma-separated list."""
    found = tuple(text.split(","))
    for mixer in found:
        if mixer not in MIXERS:
            raise argparse.ArgumentTypeError(f"{mixer!r} is no block; needs some of {', '.join(MIXERS)}, with commas")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=900, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--variant", choices=("det", "fast"), default="det", help="of Cake's ops (default: det)")
    parser.add_argument("--conv", action="store_true", help="short convolution of q, k and v, each file a document")
    parser.add_argument("--layers", type=layers, metavar="LIST", help=f"blocks with commas, of {', '.join(MIXERS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--text", type=Path, metavar="PATH", help="a file or folder instead of the standard library")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write the loss curve")
    parser.add_argument("--save", type=Path, metavar="PT", help="write the final state dict")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of torch")
    args = parser.parse_args(argv)
    for name, low, high in (("steps", 1, 10**9), ("threads", 1, 1024), ("seed", 0, 2**63 - 1)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} is {getattr(args, name)}; needs {low} to {high}")
    if args.conv and args.layers and "attention" not in args.layers:
        parser.error(f"--conv with --layers {','.join(args.layers)}; needs a block named attention, which it is of")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda; needs a CUDA device that torch can use (run without it on the CPU)")
    if args.device == "cuda":
        served = {
            "gdn": lambda arch: gdn_is_supported(KEY_HEADS, VALUE_HEADS, arch=arch),
            "gqa": lambda arch: gqa_is_supported(GQA_HEADS, GQA_KEY_HEADS, GQA_DIM, arch=arch),
        }
        for mixer in sorted(served.keys() & set(args.layers or ())):
            arch = device_arch()
            if not served[mixer](arch):
                parser.error(f"--layers has {mixer}, which has no kernels for {arch}; needs --device cpu")
    if args.text is not None and not args.text.exists():
        parser.error(f"--text is {args.text}; needs an existing file or folder")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--plot is {args.plot}; needs matplotlib (pip install matplotlib)")
    for name, path in (("plot", args.plot), ("save", args.save)):
        try:
            if path is not None:
                path.open("ab").close()
        except OSError as error:
            parser.error(f"--{name} is {path}; needs a file that can be written ({error.strerror})")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    det = args.variant == "det"
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for on CUDA before det products
    torch.use_deterministic_algorithms(det)
    configure(
        cake_rmsnorm_variant=args.variant,
        cake_gated_rmsnorm_variant=args.variant,
        cake_conv1d_variant=args.variant,
        cake_gdn_variant=args.variant,
        cake_gqa_variant=args.variant,
    )
    try:
        parts = read_text(args.text, bytes([END]) if packs_documents(args.conv, args.layers or ()) else b"\n")
        text, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    except (OSError, ValueError) as error:
        print(f"train_bytes: {error}", file=sys.stderr)
        return 1
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = ByteModel(dtype, args.conv, args.layers or ()).to(device)
    size = sum(weight.numel() for weight in model.parameters())
    source = "the Python standard library" if args.text is None else args.text.resolve().name
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    variant = f"{args.variant}, conv" if args.conv else args.variant
    variant += f", {','.join(args.layers)}" if args.layers else ""
    print(f"{size / 1e6:.2f} M parameters, {variant}, {args.device}, {threads}, seed {args.seed}")
    print(f"{source}: {text.numel():,} bytes to train on, {held.numel():,} held out")
    with progress(args.steps) as report:
        history = train(model, text, held, args.steps, args.seed, device, report)
    final = history.held_out[-1][1]
    print(f"held out: {final:.3f} bits per byte; byte frequencies alone: {history.unigram:.3f}")
    if final < history.unigram:
        print(f"verdict: learned, {history.unigram - final:.2f} bits per byte better than byte frequencies")
    else:
        print("verdict: not better than byte frequencies yet (train longer: --steps)")
    print(f"speed: {history.tokens_per_second:,.0f} tokens/s")
    print(f"weights sha256 ({threads}): {weights_sha256(model)}")
    if args.plot is not None:
        used = {"gdn": ("convolution", "gated delta rule"), "gqa": ("attention",)}
        parts_of = [name for mixer in dict.fromkeys(args.layers or ()) for name in used.get(mixer, ())]
        ops = ", ".join(dict.fromkeys(["norms", *(["convolution"] if args.conv else []), *parts_of]))
        plot(history, f"{size / 1e6:.1f} M byte model with Cake {ops} on {source}", args.plot)
        print(f"plot: {args.plot}")
    if args.save is not None:
        torch.save(model.state_dict(), args.save)
        print(f"weights: {args.save}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the run without a traceback
    sys.exit(main())
