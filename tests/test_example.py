"""examples/train_bytes.py: it trains, repeats bit for bit, draws its curve and refuses what it cannot do."""

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
from cake_core import config, configure

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
    found = re.search(r"^weights sha256 \(1 thread\): ([0-9a-f]{64})$", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


def test_two_det_runs_end_with_the_same_weights_and_another_seed_does_not(
    example: ModuleType, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = []
    for seed in ("0", "0", "1"):
        assert example.main([*SHORT, "--text", str(text), "--seed", seed]) == 0
        hashes.append(sha256(capsys.readouterr().out))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("variant", ["det", "fast"])
def test_the_variant_reaches_both_norms(example: ModuleType, text: Path, variant: str) -> None:
    assert example.main([*SHORT, "--text", str(text), "--variant", variant]) == 0
    assert config.variant("rmsnorm") == config.variant("gated_rmsnorm") == variant
    assert torch.are_deterministic_algorithms_enabled() == (variant == "det")


def test_a_learnable_text_is_learned(example: ModuleType, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """26 equally frequent letters in order: log2(26) bits without a model, next to none with one."""
    assert example.main(["--steps", "80", "--threads", "1", "--text", str(text)]) == 0
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
