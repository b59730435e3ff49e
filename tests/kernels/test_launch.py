"""What the launchers ask of a GPU that need not be there: how long a grid's axes are, and on which device it runs."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vitfocus.kernels import attention
from vitfocus.kernels.backends import has_triton, interpreting

pytestmark = pytest.mark.skipif(
    not has_triton() or interpreting(), reason="needs Triton's launcher: it is not installed, or interprets"
)

#: The longest that the second and third axis of a grid may be, on every NVIDIA GPU.
LONGEST = 65535

Launch = tuple[str, tuple[int, ...], int]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch, in place of being made: the kernel's name, its grid and the current device."""
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels import tiles
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.pooling import mixing
    from vitfocus.kernels.statistics import triton as statistics_kernels

    seen: list[Launch] = []
    current = [0]

    def exchange(device: int) -> int:
        before = current[0]
        current[0] = device if device >= 0 else before
        return before

    def run(self: Any, *args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
        seen.append((self.fn.__name__, grid, current[0]))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    for launch in (diversity_op, statistics_kernels, tiles, mixing):
        monkeypatch.setattr(launch, "available", lambda device: 227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return seen


def launch_all(images: int, device: str) -> None:
    """Every launcher there is, for so many images of few tokens."""
    from vitfocus.kernels.context import triton as context
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.diversity import with_attention
    from vitfocus.kernels.diversity.chunked import LossOptions
    from vitfocus.kernels.pooling import op as pooling
    from vitfocus.kernels.short_attention import op as short
    from vitfocus.kernels.statistics import triton as statistics_kernels

    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    for count in (4, 513):  # at once, and in blocks
        context.share_mean(torch.empty(images, count, 1, **half), None, 0.5, torch.float16)
    tokens, first = torch.empty(images, 4, 8, **half), torch.empty(2, 8, 3, 3, requires_grad=True, **half)
    for launch in (pooling._launch_whole, pooling._launch_parts):
        launch(tokens, first, (2, 2))
    query, bias = torch.empty(images, 2, 4, 16, **half), torch.empty(1, 2, 4, 4, **half)
    for mean, most in ((True, diversity_op.WHOLE), (True, 0), (False, 0)):
        place = LossOptions(1, 0, mean, True, 2)
        for keys, busy in ((0, 264), (256, 1)):  # the gradients of queries and keys apart, and at once
            with patch.multiple(diversity_op, WHOLE=most, JOINT_KEYS=keys, BUSY=busy):
                _, *saved = diversity_op.launch_forward(query, query, bias, None, None, place)
                arguments = (query, query, bias, None, place, tuple(saved), True)
                diversity_op.launch_backward(torch.ones((), device=device), *arguments)
    place = LossOptions(1, 0, True, True, 2)
    out, lse = short.launch_forward(query, query, query, 1.0)
    for most in (0, diversity_op.WHOLE):
        with patch.multiple(diversity_op, WHOLE=most, BUSY=1):
            _, *saved = diversity_op.launch_forward(query, query, None, None, None, place)
            given = (out.transpose(1, 2), torch.ones((), device=device), *(query,) * 3, lse, place)
            with_attention.launch_gradients(*given, tuple(saved))
    statistics_kernels.statistics((query, query, None, None), 1.0, [], 2.0, 1)
    statistics_kernels.pair_products((query, query, None, None), (query, query, None, None), 1.0)


#: All kernels, those that only others call left out.
KERNELS = {
    *("share_mean_kernel", "block_sums", "gather_taps", "scatter_taps", "mix", "score_gradient"),
    *("mixing_weights", "score_backward", "log_sum_exp", "mean_pass", "column_pass", "unit_pass", "unit_pass_alone"),
    "wide_mean_pass",
    *("whole_pass", "slope_pass", "gradient_pass", "query_gradient", "key_gradient", "joint_gradient", "bias_gradient"),
    *("arrange_taps", "tap_products", "tap_gradient", "track_statistics"),
    *("attention_gradient", "attend_forward", "attend_backward"),
    *("lower_kernel", "row_pass", "head_pass", "conclude_pass", "pair_pass"),
}


def test_grids_are_no_longer_than_their_axes(launches: list[Launch]) -> None:
    """A thousand pictures have more windows than the second and third axis are long."""
    launch_all(LONGEST + 1, "cpu")
    assert {name for name, _, _ in launches} == KERNELS
    assert all(length <= LONGEST for _, grid, _ in launches for length in grid[1:])
    assert all(grid[0] > LONGEST or len(grid) == 1 or name == "bias_gradient" for name, grid, _ in launches)


def test_launches_are_made_on_the_device_of_the_tensors(launches: list[Launch]) -> None:
    """Triton itself takes the current one, here the first."""
    with FakeTensorMode():
        launch_all(2, "cuda:1")
    assert {name for name, _, _ in launches} == KERNELS
    assert {device for _, _, device in launches} == {1}
    assert torch.cuda._exchange_device(-1) == 0


@pytest.mark.parametrize("bias_rows", [None, 1, -1], ids=["plain", "bias-by-key", "bias-of-all-heads"])
def test_memory_is_linear_in_the_tokens(bias_rows: int | None, launches: list[Launch]) -> None:
    """One chunk of mean maps at a time, 16 MB, and little else, where one head's map in half precision has 33 MB.

    The same with a bias by key that learns, as a mask may be. One by query and key is as large as a map itself: its
    gradient takes that in float32 and in half precision, however many heads share it.
    """
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.diversity.chunked import LossOptions

    peaks = []
    for count in (2048, 4096):
        query = torch.empty(1, count, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
        shape = (1, 1, count if bias_rows == -1 else 1, count)
        bias = None if bias_rows is None else torch.empty(shape, dtype=torch.bfloat16)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            options = LossOptions(1.0, 0, True, False, 2.0)
            _, *saved = diversity_op.launch_forward(query, query, bias, None, None, options)
            wants_bias = bias is not None
            diversity_op.launch_backward(torch.ones(()), query, query, bias, None, options, tuple(saved), wants_bias)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        peaks.append(max(itertools.accumulate(sizes)))
    if bias_rows == -1:
        assert peaks[1] < 4096 * 4096 * (2 + 4 + 2), peaks
    else:
        assert peaks[1] < 4096 * 4096 * 2 and peaks[1] < 3 * peaks[0], peaks
    assert sum(name.endswith("mean_pass") for name, *_ in launches) == 2 + 4, "in two chunks, of the longer one"


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("count", "kept"), [(65, 64), (128, 64), (197, 64), (1025, 17), (4097, 0)])
def test_what_is_kept_for_the_backward_pass_is_smaller_than_the_queries(count: int, kept: int) -> None:
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.diversity.chunked import LossOptions

    with FakeTensorMode():
        query = torch.empty(64, count, 6, 64, dtype=torch.bfloat16, device="cuda:1").transpose(1, 2)
        options = LossOptions(0.125, 0, True, False, 2.0)
        _, *saved = diversity_op.launch_forward(query, query, None, None, None, options)
        assert saved[-1].shape[0] == kept
        assert sum(one.nbytes for one in saved) < 0.85 * query.nbytes
        diversity_op.launch_backward(torch.ones((), device="cuda:1"), query, query, None, None, options, saved, False)


@pytest.mark.usefixtures("launches")
def test_statistics_of_many_keys_go_over_tiles_and_heads_in_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels.statistics import triton as statistics_kernels

    forms: list[tuple[str, bool]] = []

    def run(self: Any, *args: Any, **keywords: Any) -> None:
        if "ONE_LOOP" in keywords:
            forms.append((self.fn.__name__, keywords["ONE_LOOP"]))

    monkeypatch.setattr(JITFunction, "run", run)
    for queries, keys, one_loop in ((197, 197, True), (1025, 1025, True), (3136, 49, True), (1026, 1026, False)):
        forms.clear()
        query, key = (torch.empty(1, 2, count, 64, dtype=torch.bfloat16) for count in (queries, keys))
        statistics_kernels.statistics((query, key, None, None), 0.125, [], 2.0, 1)
        assert forms == [("row_pass", one_loop), ("column_pass", one_loop)]


def test_which_attention_comes_first_is_the_devices_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: ((8, 0), (9, 0))[torch.device(device).index]
    )
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    first: Callable[[torch.device], bool] = attention._is_cudnn_first
    assert [first(torch.device("cuda", index)) for index in range(2)] == [False, True]


def test_kernels_are_compiled_at_the_same_time_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them once, in threads, on the device of the tensors; other threads launch meanwhile as ever."""
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels import backends

    before, launched, meanwhile = JITFunction.run, [], []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **keywords: launched.append(self.fn.__name__))
    compiled: list[tuple[str, torch.device, bool]] = []

    def compile_one(device: torch.device, kernel: Any, args: Any, keywords: Any) -> None:
        compiled.append((kernel.fn.__name__, device, threading.current_thread() is threading.main_thread()))

    def launch() -> None:
        launch_all(2, "cpu")
        thread = threading.Thread(target=lambda: meanwhile.append(launch_all(2, "cpu")))
        thread.start()
        thread.join()

    def wait_for_all() -> None:
        for kernel in list(waiting):
            for hook in kernel.pre_run_hooks:
                hook()
            assert kernel.pre_run_hooks == []

    waiting: set[Any] = set()
    add = JITFunction.add_pre_run_hook
    monkeypatch.setattr(JITFunction, "add_pre_run_hook", lambda self, hook: (waiting.add(self), add(self, hook)))
    monkeypatch.setattr(backends, "_compile", compile_one)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 1)
    for key in ("one", "one", "other"):
        backends.compile_together(device, (key, object if key == "other" else int), launch)
    wait_for_all()
    names = [name for name, *_ in compiled]
    assert set(names) == KERNELS == set(launched)
    assert names.count("lower_kernel") == 2 * names.count("pair_pass") > 0
    assert {(one, main) for _, one, main in compiled} == {(device, False)}
    backends.compile_together(torch.device("cpu"), "on a CPU", launch)
    assert len(compiled) == len(names) and len(meanwhile) == 2
    monkeypatch.undo()
    assert JITFunction.run is before


def test_a_launch_waits_until_its_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone waits, not the thread that compiles, which runs the same hooks, and not the launch of another kernel."""
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels import backends
    from vitfocus.kernels.tiles import log_sum_exp, lower_kernel

    events: list[str] = []
    may_end, begun = threading.Event(), threading.Event()

    def run(self: Any, *args: Any, warmup: bool, **keywords: Any) -> Any:
        for hook in self.pre_run_hooks:
            hook(*args, **keywords)
        if warmup:
            begun.set()
            assert may_end.wait(10)
        events.append(f"{'compiled' if warmup else 'launched'} {self.fn.__name__}")

    def launch() -> None:
        for block in (128, 256):
            lower_kernel[1,](BLOCK=block)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", torch.device)
    backends.compile_together(torch.device("cuda", 0), object(), launch)
    assert begun.wait(10)
    log_sum_exp[1,]()
    waiting = threading.Thread(target=launch)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and events == ["launched log_sum_exp"]
    may_end.set()
    waiting.join(10)
    assert events[1:] == ["compiled lower_kernel"] * 2 + ["launched lower_kernel"] * 2
    assert lower_kernel.pre_run_hooks == []


def test_a_launch_that_waits_to_be_compiled_keeps_no_memory() -> None:
    """Of its tensors, the compiler needs the type, and whether an address is a multiple of 16 bytes."""
    from vitfocus.kernels.backends import launches_of
    from vitfocus.kernels.tiles import lower_kernel

    made: list[weakref.ref[torch.Tensor]] = []

    def launch() -> None:
        tensors = torch.empty(64, dtype=torch.bfloat16), torch.empty(64)[1:]
        made.extend(map(weakref.ref, tensors))
        lower_kernel[1,](*tensors, 3, BLOCK=128)

    ((_, args, keywords),) = launches_of(launch).values()
    assert made[0]() is None and args[0].numel() == 0 and args[0].dtype == torch.bfloat16
    assert args[1] is made[1]() and args[1].data_ptr() % 16
    assert args[2:] == (3,) and keywords["BLOCK"] == 128


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("count", [1, 7, 50, 197, 300, 785, 900, 1025, 3137, 4097])
@pytest.mark.parametrize("width", [16, 80])
def test_block_sizes_are_powers_of_two(count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles no other, and the interpreter does not check it: 785 tokens once failed on a GPU alone."""
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.diversity.chunked import LossOptions
    from vitfocus.kernels.statistics import triton as statistics_kernels

    blocks: dict[str, set[int]] = {}

    def run(self: Any, *args: Any, **keywords: Any) -> None:
        for name, size in keywords.items():
            if name in ("BLOCK", "BM", "BN", "BC", "BK", "BT", "BR", "BH", "DP"):
                blocks.setdefault(f"{self.fn.__name__}.{name}", set()).add(size)

    monkeypatch.setattr(JITFunction, "run", run)
    query = torch.empty(1, count, 3, width, dtype=torch.bfloat16).transpose(1, 2)
    for rows, most in itertools.product((None, torch.arange(0, count, 2)), (0, diversity_op.WHOLE)):
        options = LossOptions(1.0, 0, True, False, 2.0)
        with patch.object(diversity_op, "WHOLE", most):
            _, *saved = diversity_op.launch_forward(query, query, None, rows, None, options)
            diversity_op.launch_backward(torch.ones(()), query, query, None, rows, options, tuple(saved), False)
    statistics_kernels.statistics((query, query, None, None), 1.0, [], 2.0, 1)
    statistics_kernels.pair_products((query, query, None, None), (query, query, None, None), 1.0)
    mean = "mean_pass.BM" if width > 64 else "wide_mean_pass.BM"
    assert {"lower_kernel.BLOCK", mean, "row_pass.BN"} <= set(blocks)
    assert ("whole_pass.BM" in blocks) == (count < 128 and width <= 64)
    assert not {name: sizes for name, sizes in blocks.items() if any(size & (size - 1) for size in sizes)}


def test_the_gradient_of_the_loss_may_lie_anywhere() -> None:
    """That of each layer is a number of one tensor: with two alignments, every kernel would be compiled twice."""
    from vitfocus.kernels.diversity import gradients
    from vitfocus.kernels.short_attention import triton as short

    kernels = [short.attend_backward, gradients.attention_gradient, gradients.joint_gradient, gradients.bias_gradient]
    for kernel in (*kernels, gradients.query_gradient, gradients.key_gradient):
        (weight,) = (one for one in kernel.params if one.name == "weight")
        assert weight.do_not_specialize_on_alignment, kernel.fn.__name__
