"""examples/train_bytes.py: it trains, repeats bit for bit, keeps documents apart, draws its curve and refuses what it
cannot do."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from cake_core import config, configure
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
SHORT = ("--steps", "4", "--threads", "1")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module, with a model small enough for tests."""
    spec = importlib.util.spec_from_file_location("train_bytes", ROOT / "examples" / "train_bytes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    module.LAYERS, module.CONTEXT, module.BATCH = 1, 32, 2
    return module


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """The script sets threads, determinism and the configuration of its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    configure()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file in which every byte follows from the one before."""
    file = tmp_path / "alphabet.txt"
    file.write_text("abcdefghijklmnopqrstuvwxyz" * 400)
    return file


def sha256(output: str) -> str:
    found = re.search(r"^weights sha256 \((?:1 thread|\d+ threads)\): ([0-9a-f]{64})$", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


@pytest.mark.parametrize(
    "options",
    [(), ("--conv",), ("--layers", "gdn,attention"), ("--layers", "gqa")],
    ids=["norms", "conv", "gdn", "gqa"],
)
def test_two_det_runs_end_with_the_same_weights_and_another_seed_does_not(
    example: ModuleType, text: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = []
    for seed in ("0", "0", "1"):
        assert example.main([*SHORT, *options, "--text", str(text), "--seed", seed]) == 0
        hashes.append(sha256(capsys.readouterr().out))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("variant", ["det", "fast"])
def test_the_variant_reaches_every_op(example: ModuleType, text: Path, variant: str) -> None:
    assert example.main([*SHORT, "--text", str(text), "--variant", variant]) == 0
    assert {config.variant(op) for op in ("rmsnorm", "gated_rmsnorm", "conv1d", "gdn", "gqa")} == {variant}
    assert torch.are_deterministic_algorithms_enabled() == (variant == "det")


@pytest.mark.parametrize(
    "options",
    [(), ("--conv",), ("--layers", "gdn,attention"), ("--layers", "gqa")],
    ids=["norms", "conv", "gdn", "gqa"],
)
def test_a_learnable_text_is_learned(
    example: ModuleType, text: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """26 equally frequent letters in order: log2(26) bits without a model, next to none with one."""
    assert example.main(["--steps", "80", "--threads", "1", *options, "--text", str(text)]) == 0
    output = capsys.readouterr().out
    found = re.search(r"^held out: ([\d.]+) bits per byte; byte frequencies alone: ([\d.]+)$", output, re.MULTILINE)
    assert found is not None, output
    assert float(found[2]) == pytest.approx(4.700, abs=0.01)
    assert float(found[1]) < 1.0
    assert "verdict: learned" in output
    assert re.search(r"^speed: [\d,]+ tokens/s$", output, re.MULTILINE)


def test_one_step_on_noise_is_not_called_learned(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = tmp_path / "noise"
    noise.write_bytes(bytes(torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).tolist()))
    assert example.main(["--steps", "1", "--threads", "1", "--text", str(noise)]) == 0
    assert "verdict: not better than byte frequencies yet" in capsys.readouterr().out


def test_every_weight_of_both_norms_is_trained(example: ModuleType, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    assert example.main([*SHORT, "--text", str(text), "--save", str(file)]) == 0
    weights = torch.load(file)
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    assert len(norms) == 4
    for name, weight in norms.items():
        start = 1.0 if name.endswith("norm_weight") else 0.0
        assert bool((weight != start).any()), f"{name} did not move"


# --conv -----------------------------------------------------------------------------------------------------------

FRESH = """
import sys

sys.path.insert(0, sys.argv[1])
import train_bytes

train_bytes.LAYERS, train_bytes.CONTEXT, train_bytes.BATCH = 1, 256, 4
sys.exit(train_bytes.main(sys.argv[2:]))
"""


@pytest.fixture
def conv_model(example: ModuleType) -> nn.Module:
    """A model with the convolution whose head, unlike that of a new one, tells its inputs apart."""
    torch.manual_seed(0)
    model = example.ByteModel(torch.float32, conv=True)
    nn.init.normal_(model.head.weight)
    return model


def test_with_conv_a_fresh_process_and_another_number_of_threads_end_with_the_same_weights(
    example: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the batch of a real run: torch splits a smaller one over no threads."""
    for name, size in (("CONTEXT", 256), ("BATCH", 4)):
        monkeypatch.setattr(example, name, size)
    options = ["--conv", "--steps", "2", "--text", str(text), "--threads"]
    hashes = []
    for threads in ("1", "2", "3"):
        assert example.main([*options, threads]) == 0
        hashes.append(sha256(capsys.readouterr().out))
    command = (sys.executable, "-c", FRESH, ROOT / "examples", *options, "2")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert {*hashes, sha256(run.stdout)} == {hashes[0]}


def test_conv_and_the_place_of_a_boundary_change_the_weights(
    example: ModuleType, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes each time; documents end nowhere inside of a window, after each m, after each n."""
    hashes: dict[bool, list[str]] = {True: [], False: []}
    for end in (0, ord("m"), ord("n")):
        monkeypatch.setattr(example, "END", end)
        for conv in hashes:
            assert example.main([*SHORT, "--text", str(text), *["--conv"] * conv]) == 0
            hashes[conv].append(sha256(capsys.readouterr().out))
    assert len(set(hashes[False])) == 1
    assert len({*hashes[True], *hashes[False]}) == 4


def test_a_document_begins_with_each_row_and_after_each_end(example: ModuleType) -> None:
    cu_seqlens, mask = example.documents(torch.tensor([[7, 0, 7, 7], [0, 7, 0, 0]]))
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 2, 4, 5, 7, 8], torch.int32)
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    second = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert torch.equal(mask, torch.tensor([[first], [second]], dtype=torch.bool))


def test_with_conv_alone_the_files_of_a_folder_are_documents(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("twenty-five bytes of text")
    windows, documents = example.windows, example.documents
    ends, lengths = [], []

    def take_windows(*operands: object) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = windows(*operands)
        ends.append(bool((inputs == example.END).any()))
        return inputs, targets

    def find_documents(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        docs = documents(tokens)
        lengths.extend(docs.cu_seqlens.diff().tolist())
        return docs

    monkeypatch.setattr(example, "windows", take_windows)
    monkeypatch.setattr(example, "documents", find_documents)
    assert example.main([*SHORT, "--text", str(tmp_path)]) == 0
    assert (any(ends), lengths) == (False, [])
    assert example.main([*SHORT, "--conv", "--text", str(tmp_path)]) == 0
    assert (any(ends), max(lengths)) == (True, 26)  # END included


@pytest.mark.parametrize(
    ("row", "begin"), [(0, 10), (1, 0)], ids=["another one earlier in the row", "others in the row before"]
)
def test_bytes_of_another_document_change_neither_the_loss_nor_the_gradient_of_this_one(
    example: ModuleType, conv_model: nn.Module, row: int, begin: int
) -> None:
    """Row 0 is a document of 9 bytes, END and one of 22 bytes, row 1 is one of 32. Bit for bit."""
    own = torch.randint(1, 100, (32 - begin,), generator=torch.Generator().manual_seed(0))
    taps, embedding = conv_model.blocks[0].attention.taps, conv_model.embed.weight
    results = []
    for seed in (1, 2):
        tokens = torch.randint(100, 256, (2, 32), generator=torch.Generator().manual_seed(seed))  # the others' bytes
        tokens[0, 9] = example.END
        tokens[row, begin:] = own
        conv_model.zero_grad()
        loss = F.cross_entropy(conv_model(tokens)[row, begin:-1], own[1:])
        loss.backward()
        assert embedding.grad[own].any(1).any()
        assert not embedding.grad[100:].any()
        results.append((loss.detach(), taps.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_every_tap_is_trained(example: ModuleType, conv_model: nn.Module) -> None:
    tokens = torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    example.bits(conv_model, tokens, tokens.roll(-1, 1)).backward()
    assert conv_model.blocks[0].attention.taps.grad.all()


def test_help_says_what_conv_does(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--conv short convolution of q, k and v, each file a document" in words


# The curve and the command line -----------------------------------------------------------------------------------


def test_the_plot_is_an_svg_whose_words_are_text(example: ModuleType, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "loss.svg"
    assert example.main([*SHORT, "--text", str(text), "--plot", str(file)]) == 0
    words = " ".join(ET.parse(file).getroot().itertext())
    for word in ("Cake norms", "step", "bits per byte", "held out", "byte frequencies alone"):
        assert word in words, f"{word!r} is not in the chart"


def test_the_last_number_of_the_plot_stands_beside_the_curves(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    places = []

    def savefig(self, path: Path, **options: object) -> None:
        self.canvas.draw()
        (axes,) = self.axes
        places.append((axes.bbox.x1, axes.texts[0].get_text(), axes.texts[0].get_window_extent(), self.bbox.x1))

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    for steps in (1, 40):
        history = example.History(train=[4.0] * steps, held_out=[(0, 8.0), (steps, 3.92)], unigram=3.9)
        example.plot(history, "a title with $ and $", tmp_path / "loss.svg")
    for right_of_axes, words, label, right_of_figure in places:
        assert words == "3.92"
        assert right_of_axes < label.x0 < label.x1 <= right_of_figure
    assert len(places) == 2


def test_whole_files_are_held_out_and_the_split_does_not_depend_on_their_order(
    example: ModuleType, tmp_path: Path
) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"<{number}>" * 40)
    train, held = example.read_text(tmp_path)
    marks = [set(re.findall(rb"<(\d+)>", part)) for part in (train, held)]
    assert marks[0] | marks[1] == {str(number).encode() for number in range(60)}
    assert not marks[0] & marks[1]
    assert example.read_text(tmp_path) == (train, held)


def test_the_standard_library_is_text_enough(example: ModuleType) -> None:
    train, held = example.read_text(None)
    assert len(train) > 5_000_000
    assert len(held) > 200_000
    assert b"def " in held


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "0"], "--steps is 0; needs 1 to 1000000000"),
        (["--steps", "-1"], "--steps is -1; needs 1 to 1000000000"),
        (["--threads", "-1"], "--threads is -1; needs 1 to 1024"),
        (["--seed", str(2**63)], f"--seed is {2**63}; needs 0 to {2**63 - 1}"),
        (["--text", "no/such/folder"], "--text is no/such/folder; needs an existing file or folder"),
        (["--plot", "no/such/folder/loss.svg"], "--plot is no/such/folder/loss.svg; needs a file that can be written"),
        (["--plot", "."], "--plot is .; needs a file that can be written (Is a directory)"),
        (["--save", "no/such/folder/it.pt"], "--save is no/such/folder/it.pt; needs a file that can be written"),
        (["--variant", "quick"], "invalid choice: 'quick'"),
        pytest.param(
            ["--device", "cuda"],
            "--device is cuda; needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_misuse_ends_with_status_2_and_names_the_option(
    example: ModuleType, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_training(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        example.main(["--plot", str(tmp_path / "loss.svg")])
    assert "needs matplotlib" in capsys.readouterr().err


def test_a_reader_that_stops_early_ends_the_run_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = (sys.executable, ROOT / "examples" / "train_bytes.py", "--help")
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (-signal.SIGPIPE, b"")


def test_smoothing_follows_a_slope_from_the_first_step_and_scales_with_the_run(example: ModuleType) -> None:
    assert example.smoothed([1.0]) == [1.0]
    slope = [8.0 - step for step in range(300)]
    half = 300 // 50 + 1
    assert example.smoothed(slope)[:-half] == pytest.approx(slope[:-half])
    spike = [0.0] * 300
    spike[150] = 1.0
    assert sum(value > 0 for value in example.smoothed(spike)) == 2 * half + 1


def test_too_little_text_is_an_error_without_a_traceback(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "note.txt").write_text("short")
    assert example.main([*SHORT, "--text", str(tmp_path / "note.txt")]) == 1
    assert "5 training and 0 held-out bytes; needs 33" in capsys.readouterr().err


# --layers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["gdn", "gqa"])
def hybrid(example: ModuleType, request: pytest.FixtureRequest) -> nn.Module:
    """A block of the kind behind attention, with a head that tells its inputs apart."""
    torch.manual_seed(0)
    model = example.ByteModel(torch.float32, False, ("attention", request.param))
    nn.init.normal_(model.head.weight, std=0.1)
    return model


def test_with_gdn_a_fresh_process_ends_with_the_same_weights(
    example: ModuleType, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--layers", "gdn,gdn,attention", "--steps", "2", "--threads", "1", "--text", str(text)]
    arguments = [sys.executable, "-c", FRESH, str(ROOT / "examples"), *options]
    runs = [subprocess.run(arguments, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert sha256(runs[0]) == sha256(runs[1])
    assert "det, gdn,gdn,attention, cpu" in runs[0]
    assert example.main(["--layers", "attention", *options[2:]]) == 0
    assert sha256(capsys.readouterr().out) != sha256(runs[0])


@pytest.mark.parametrize(("row", "begin"), [(0, 0), (0, 11), (1, 20)])
def test_a_document_has_the_bits_that_it_has_alone(
    example: ModuleType, hybrid: nn.Module, row: int, begin: int
) -> None:
    """Bytes of other documents change neither its logits nor what its loss does to its own embeddings."""
    tokens = torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    tokens[0, 10], tokens[1, 19] = example.END, example.END
    other = tokens.clone()
    end = 10 if (row, begin) == (0, 0) else 32
    changed = torch.ones_like(tokens, dtype=torch.bool)
    changed[row, begin:end] = False
    other[changed & (tokens != example.END)] = 7
    logits = [hybrid(t)[row, begin:end] for t in (tokens, other)]
    assert torch.equal(*logits)
    assert not torch.equal(hybrid(tokens)[row, begin:end], hybrid(tokens.roll(1, 1))[row, begin:end])


def test_every_weight_of_a_block_is_trained(example: ModuleType, hybrid: nn.Module) -> None:
    tokens = torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    example.bits(hybrid, tokens, tokens.roll(-1, 1)).backward()
    for name, weight in hybrid.blocks[1].attention.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


@pytest.mark.parametrize("given", ["gdn,mamba", "", "gdn,"])
def test_blocks_that_do_not_exist_are_refused(
    example: ModuleType, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main([*SHORT, "--layers", given])
    assert "is no block; needs some of attention, gdn, gqa" in capsys.readouterr().err


@pytest.mark.parametrize("mixer", ["gdn", "gqa"])
def test_a_block_is_refused_on_a_device_that_it_has_no_kernels_for(
    example: ModuleType, mixer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(example, "device_arch", lambda: "sm_80")
    with pytest.raises(SystemExit):
        example.main([*SHORT, "--device", "cuda", "--layers", mixer])
    assert f"--layers has {mixer}, which has no kernels for sm_80" in capsys.readouterr().err
