"""Every kernel goes through Triton's compiler for a GPU that need not be there; the interpreter does not check types.

A launch is replaced by compiling what would have been launched, for the arguments' types as Triton itself sees them.
What a kernel takes of a GPU's shared memory is known then too, and a launch with more than there is fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from vitfocus.kernels.backends import has_triton, interpreting

pytestmark = pytest.mark.skipif(
    not has_triton() or interpreting(), reason="needs Triton's compiler: it is not installed, or interprets"
)

#: Bytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32"}


def described(value: Any, place: tuple[int, ...], constants: dict[Any, Any], aligned: dict[Any, Any], real: str) -> Any:
    """An argument's type for Triton; `constants` gets what is compiled in, `aligned` what lies at multiples of 16."""
    if isinstance(value, tuple):
        return tuple(described(one, (*place, number), constants, aligned, real) for number, one in enumerate(value))
    if isinstance(value, Tensor):
        aligned[place] = [["tt.divisibility", 16]]
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return real
    if value is None or isinstance(value, bool) or value == 1:
        constants[place] = value
        return "constexpr"
    if value % 16 == 0:
        aligned[place] = [["tt.divisibility", 16]]
    return "i32" if abs(value) < 2**31 else "i64"


class Compiler:
    """Stands in for a kernel's `run`; `compiled` are the names of the kernels it has seen.

    `real` is the type of float arguments: Triton launches with fp32, and torch.compile (in torch 2.11) with fp64.
    """

    def __init__(self, capability: int, real: str = "fp32") -> None:
        self.capability, self.real = capability, real
        self.shared = SHARED[capability]
        self.compiled: list[str] = []
        self.known: set[str] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        given = dict(zip(kernel.arg_names, args, strict=False)) | keywords
        options = {key: value for key, value in keywords.items() if key not in kernel.arg_names}
        signature: dict[str, Any] = {}
        constants: dict[Any, Any] = {}
        aligned: dict[Any, Any] = {}
        for number, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[number,] = "constexpr", value
            else:
                signature[parameter.name] = described(value, (number,), constants, aligned, self.real)
        self.compiled.append(kernel.fn.__name__)
        key = repr((kernel.fn.__name__, signature, constants, aligned, options))
        if key not in self.known:
            self.known.add(key)
            source = ASTSource(kernel, signature, constants, aligned)
            options |= {"enable_fp_fusion": True}  # the default, which some versions warn of
            made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
            assert made.asm["cubin"]
            wide = {line.split()[0] for line in made.asm["ptx"].splitlines() if ".f64" in line.partition("//")[0]}
            assert wide <= {".param", "ld.param.b64", "cvt.rn.f32.f64"}, (
                f"{kernel.fn.__name__} computes in float64: {wide}"
            )
            assert made.metadata.shared <= self.shared, f"{kernel.fn.__name__} takes {made.metadata.shared} bytes"


@pytest.fixture(params=[80, 90, (90, "fp64")], ids=["sm80", "sm90", "sm90-fp64"])
def compiler(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Compiler]:
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    from vitfocus.kernels import tiles
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.pooling import mixing
    from vitfocus.kernels.statistics import triton as statistics_kernels

    made = Compiler(*request.param) if isinstance(request.param, tuple) else Compiler(request.param)
    if made.real == "fp64":  # types are all that differs: assembling again would find nothing new
        monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"not assembled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **keywords: made.run(self, *args, **keywords))
    for launch in (diversity_op, statistics_kernels, tiles, mixing):
        monkeypatch.setattr(launch, "available", lambda device: made.shared)
    yield made


def attention(
    dtype: torch.dtype, biased: bool, size: tuple[int, int] | None = None, count: int = 70
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and a bias: heads and width of `size`, by default DeiT-Ti's, or with a bias two of Swin's.

    With a count of tokens that 16 divides, the bias is in float32, as under autocast: it then takes most space.
    """
    heads, width = size or ((2, 32) if biased else (3, 64))
    query, key, _ = torch.randn(2, count, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    bias = torch.randn(1, heads, count, count, dtype=torch.float32 if count % 16 == 0 else dtype)
    return query, key, bias if biased else None


def diversity(
    dtype: torch.dtype,
    mean: bool,
    paper: bool,
    biased: bool,
    sampled: bool,
    size: tuple[int, int] | None = None,
    count: int = 70,
) -> None:
    from vitfocus.kernels.diversity import op
    from vitfocus.kernels.diversity.chunked import LossOptions

    query, key, bias = attention(dtype, biased, size, count)
    rows = torch.arange(0, count, 2) if sampled else None
    options = LossOptions(0.125, 0, mean, paper, 2.0)
    _, *saved = op.launch_forward(query, key, bias, rows, None, options)
    op.launch_backward(torch.ones(()), query, key, bias, rows, options, tuple(saved), biased)


def joint_diversity(biased: bool) -> None:
    """The loss where one program computes both gradients of a head, with the most keys it takes."""
    from vitfocus.kernels.diversity import op
    from vitfocus.kernels.diversity.chunked import LossOptions

    query, key, bias = attention(HALF, biased, (2, 64), 256)
    options = LossOptions(0.125, 0, True, False, 2.0)
    with patch.object(op, "BUSY", 1):
        _, *saved = op.launch_forward(query, key, bias, None, None, options)
        op.launch_backward(torch.ones(()), query, key, bias, None, options, tuple(saved), biased)


def whole_maps(dtype: torch.dtype, paper: bool, biased: bool, given: bool, joint: bool, count: int) -> None:
    """The loss of maps that a program keeps in registers, with gradients that are kept and without."""
    from vitfocus.kernels.diversity import op
    from vitfocus.kernels.diversity.chunked import LossOptions

    query, key, bias = attention(dtype, biased, (6, 64), count)
    lse = torch.ones(query.shape[:3]) if given else None
    options = LossOptions(0.125, count % 2, True, paper, 2.0)
    with patch.object(op, "BUSY", 1 if joint else 10**6):
        for wants in (True, False):
            _, *saved = op.launch_forward(query, key, bias, None, lse, options, wants)
        op.launch_backward(torch.ones(()), query, key, bias, None, options, tuple(saved), biased)


def joined_attention(count: int, dtype: torch.dtype) -> None:
    """The gradients of attention and loss as one operation."""
    from vitfocus.kernels.diversity import op, with_attention
    from vitfocus.kernels.diversity.chunked import LossOptions

    query, key, _ = attention(dtype, False, (6, 64), count)
    options = LossOptions(0.125, count % 2, True, False, 2.0)
    with patch.object(op, "BUSY", 1):
        _, *saved = op.launch_forward(query, key, None, None, torch.ones(query.shape[:3]), options)
        tensors = (query, key, query, torch.ones(query.shape[:3]))
        with_attention.launch_gradients(query.transpose(1, 2), torch.ones(()), *tensors, options, tuple(saved))


#: Two launches for the gradients of attention.
SPLIT = ((True, False, 32, 16, 2, 2), (False, True, 64, 16, 2, 0))


def mapped_attention(count: int, dtype: torch.dtype) -> None:
    """As `joined_attention`, with a program per map and two tiles of it at a time."""
    from vitfocus.kernels.diversity import op, with_attention

    wide, by_map = patch.object(op, "WIDE", (128, 32, 8, 3)), patch.object(op, "BY_MAP", (32, 8, 3))
    with wide, by_map, patch.object(with_attention, "PASSES", SPLIT):
        joined_attention(count, dtype)


def pooling(dtype: torch.dtype, branches: int = 4, channels: int = 64, side: int = 7) -> None:
    """All that a training step launches, with and without the norm."""
    from vitfocus.kernels.pooling import op

    tokens, first = torch.randn(2, side**2 + 1, channels, dtype=dtype), torch.randn(branches, channels, 3, 3)
    for launch in (op._launch_whole, op._launch_parts):
        launch(tokens, first.requires_grad_(), (side, side))


def context(dtype: torch.dtype) -> None:
    from vitfocus.kernels.context import triton as fused

    for count in (50, 1025):
        tokens = torch.randn(1, count, 64, dtype=dtype)
        fused.share_mean(tokens, None, 0.5, torch.bfloat16)
        fused.share_mean(tokens, torch.zeros(64), 1.0, dtype)


def statistics(
    dtype: torch.dtype, biased: bool, size: tuple[int, int] | None = None, count: int = 70, one_loop: bool = True
) -> None:
    from vitfocus.kernels.statistics import triton as statistics_kernels
    from vitfocus.kernels.statistics.triton import count as count_values

    query, key, bias = attention(dtype, biased, size, count)
    sides = [] if biased else [3, count // 3, 3, count // 3, count % 3]
    with patch.object(statistics_kernels, "ONE_LOOP_KEYS", count if one_loop else 0):
        statistics_kernels.statistics((query, key, bias, None), 0.125, sides, 2.0, 3)
    statistics_kernels.pair_products((query, key, bias, None), (query, key, bias, None), 0.125)
    count_values(torch.zeros(1000), torch.zeros(1 << 18, dtype=torch.int32), -1.0, 15.0)


HALF, SINGLE = torch.bfloat16, torch.float32
CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], set[str]]] = {
    "loss": (
        diversity,
        (HALF, True, False, False, False, None, 150),
        {"mean_pass", "column_pass", "unit_pass", "slope_pass", "gradient_pass", "key_gradient", "query_gradient"},
    ),
    "loss, both gradients at once": (joint_diversity, (True,), {"gradient_pass", "joint_gradient", "bias_gradient"}),
    "loss, other form": (
        diversity,
        (SINGLE, False, True, True, True),
        {"unit_pass_alone", "bias_gradient", "log_sum_exp"},
    ),
    "loss, whole maps": (whole_maps, (HALF, False, False, True, True, 65), {"whole_pass", "joint_gradient"}),
    "loss, whole maps of all keys": (whole_maps, (HALF, True, False, False, False, 128), {"whole_pass"}),
    "loss, whole maps with a bias": (whole_maps, (HALF, False, True, True, True, 49), {"whole_pass", "bias_gradient"}),
    "loss, whole maps in float32": (whole_maps, (SINGLE, True, False, True, False, 65), {"whole_pass"}),
    "loss, with attention": (joined_attention, (197, HALF), {"mean_pass", "gradient_pass", "attention_gradient"}),
    "loss, with attention, all keys": (joined_attention, (256, torch.float16), {"attention_gradient"}),
    "loss, with attention, by map": (
        mapped_attention,
        (197, HALF),
        {"wide_mean_pass", "map_pass", "attention_gradient"},
    ),
    "pooling": (
        pooling,
        (HALF,),
        {"gather_taps", "scatter_taps", "mixing_weights", "mix", "score_gradient", "score_backward"},
    ),
    "context": (context, (SINGLE,), {"share_mean_kernel", "block_sums"}),
    "statistics": (
        statistics,
        (HALF, False),
        {"row_pass", "head_pass", "column_pass", "conclude_pass", "pair_pass", "count_pass"},
    ),
    "statistics, in two loops": (statistics, (HALF, False, None, 70, False), {"row_pass", "column_pass"}),
    "statistics, with a bias": (statistics, (SINGLE, True), {"row_pass", "column_pass", "pair_pass"}),
    "statistics, with a bias, in two loops": (statistics, (SINGLE, True, None, 70, False), {"row_pass"}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, compiler: Compiler) -> None:
    call, arguments, kernels = CASES[name]
    call(*arguments)
    assert kernels <= set(compiler.compiled)


#: What each kernel writes to.
WRITTEN = {
    "diversity.attention_gradient": {"out"},
    "context.block_sums": {"sums"},
    "context.share_mean_kernel": {"means", "out"},
    "diversity.bias_gradient": {"out"},
    "diversity.column_pass": {"average", "lengths"},
    "diversity.gradient_pass": {"out"},
    "diversity.joint_gradient": {"inner", "key_out", "out"},
    "diversity.key_gradient": {"out"},
    "diversity.map_pass": {"bounds", "losses", "out"},
    "diversity.mean_pass": {"a", "column_sums", "squares"},
    "diversity.query_gradient": {"inner", "out"},
    "diversity.slope_pass": {"bounds", "losses", "slopes"},
    "diversity.unit_pass": {"column_sums", "unit_sums"},
    "diversity.unit_pass_alone": {"along", "towards", "unit_sums"},
    "diversity.whole_pass": {"bounds", "losses", "norms", "slope"},
    "diversity.wide_mean_pass": {"a", "squares"},
    "kernels.log_sum_exp": {"out"},
    "kernels.lower_kernel": {"norms"},
    "pooling.gather_taps": {"hidden", "partial"},
    "pooling.mix": {"out"},
    "pooling.mixing_weights": {"weights", "statistics"},
    "pooling.scatter_taps": {"spread", "totals"},
    "pooling.score_backward": {"hidden_gradient", "sums"},
    "pooling.score_gradient": {"made"},
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What torch.compile takes every launched kernel to write to, which it reads from Triton's first representation."""
    import triton
    from torch._higher_order_ops import triton_kernel_wrap
    from triton.backends.compiler import GPUTarget

    from vitfocus.kernels import tiles
    from vitfocus.kernels.diversity import op as diversity_op
    from vitfocus.kernels.pooling import mixing
    from vitfocus.kernels.statistics import triton as statistics_kernels

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    found: dict[str, set[str]] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | keywords
        given = {name: value for name, value in given.items() if name in self.arg_names}
        if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):
            names = triton_kernel_wrap.identify_mutated_tensors(self, given, {})
        else:
            accesses = triton_kernel_wrap.identify_accessed_tensors(self, given, {})
            names = [one.name for one in accesses.read_writes.writes]
        kernel = f"{self.fn.__module__.split('.')[-2]}.{self.fn.__name__}"
        found.setdefault(kernel, set()).update(name for name in names if isinstance(given[name], Tensor))

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", run)
    for launch in (diversity_op, statistics_kernels, tiles, mixing):
        monkeypatch.setattr(launch, "available", lambda device: SHARED[90])
    return found


def test_torch_compile_knows_what_the_kernels_write_to(written: dict[str, set[str]]) -> None:
    # An input that it takes for an output is copied, 58 million numbers per layer of DeiT-S, and read beyond its end.
    for call, arguments, _ in CASES.values():
        if call is not statistics:  # which torch.compile never sees
            call(*arguments)
    diversity(HALF, True, False, True, True)  # sampled rows, whose numbers are loaded
    assert written == WRITTEN


#: Channels of a head. Heads are not compiled in: what matters is whether there is one, and whether 16 divides them.
WIDTHS = (16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
#: Heads and width of the statistics: one wide one, DeiT-S, ViT-B, ViT-L, ViT-H, Swin, many.
SIZES = [(1, 192), (8, 96), (8, 128), (6, 64), (12, 64), (16, 64), (16, 80), (24, 32), (4, 128), (48, 16), (3, 256)]
TYPED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def taken(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of shared memory of everything launched, by kernel.

    The compiler knows them when it has come to PTX; assembling that is the longer half, and is left out.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    class Enough(Exception):
        pass

    def stop(self: Any, source: Any, metadata: dict[str, Any], *rest: Any) -> None:
        raise Enough(metadata["shared"])

    bytes_of: dict[str, int] = {}

    def run(self: Any, *args: Any, **keywords: Any) -> None:
        try:
            compiler.run(self, *args, **keywords)
        except Enough as known:
            bytes_of[self.fn.__name__] = max(bytes_of.get(self.fn.__name__, 0), known.args[0])

    monkeypatch.setattr(CUDABackend, "make_ptx", stop)
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", run)
    return bytes_of


def check_diversity(compiler: Compiler, taken: dict[str, int], width: int, dtype: torch.dtype) -> None:
    from vitfocus.kernels.diversity import op

    for heads, count in ((6, 50), (6, 70), (48, 128), (1, 70)):
        for biased in (False, True):
            for most in (0, op.WHOLE):
                with patch.object(op, "WHOLE", most):
                    diversity(dtype, True, False, biased, False, (heads, width), count)
    assert {"mean_pass", "key_gradient", "query_gradient", "bias_gradient", "log_sum_exp"} <= set(taken)
    assert ("whole_pass" in taken) == (width <= 64)
    assert max(taken.values()) <= compiler.shared, taken


@pytest.mark.parametrize("compiler", [90], indirect=True, ids=["sm90"])
def test_eight_heads_of_128_channels_fit_into_shared_memory(compiler: Compiler, taken: dict[str, int]) -> None:
    diversity(HALF, True, False, False, False, (8, 128))
    assert {"mean_pass", "key_gradient", "query_gradient", "log_sum_exp"} <= set(taken)
    assert max(taken.values()) <= compiler.shared, taken


@pytest.mark.parametrize("compiler", [89], indirect=True, ids=["sm89"])
def test_wide_heads_fit_where_there_is_least_shared_memory(compiler: Compiler, taken: dict[str, int]) -> None:
    """A sample of the slow tests, with a count of tokens that 16 divides and one that it does not."""
    diversity(torch.float16, True, False, True, False, (8, 96))
    for one_loop in (True, False):
        statistics(HALF, True, (8, 128), 128, one_loop)
    pooling(HALF, 4, 768)
    context(HALF)
    names = {"mean_pass", "key_gradient", "query_gradient", "bias_gradient", "row_pass", "column_pass", "pair_pass"}
    assert names | {"mix", "score_gradient", "share_mean_kernel"} <= set(taken)
    assert max(taken.values()) <= compiler.shared, taken


@pytest.mark.parametrize("compiler", [80, 89], indirect=True, ids=["sm80", "sm89"])
def test_both_gradients_at_once_only_where_they_fit(compiler: Compiler, taken: dict[str, int]) -> None:
    joint_diversity(biased=True)
    assert ("joint_gradient" in taken) == (compiler.capability == 80) != ("key_gradient" in taken)
    assert max(taken.values()) <= compiler.shared, taken


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [80, 89, 90], indirect=True, ids=["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPED.values(), ids=TYPED)
def test_all_heads_fit_into_shared_memory(
    dtype: torch.dtype, width: int, compiler: Compiler, taken: dict[str, int]
) -> None:
    check_diversity(compiler, taken, width, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [80, 89, 90], indirect=True, ids=["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("dtype", TYPED.values(), ids=TYPED)
def test_statistics_fit_into_shared_memory(
    dtype: torch.dtype, size: tuple[int, int], compiler: Compiler, taken: dict[str, int]
) -> None:
    for biased, count in ((False, 70), (True, 70), (True, 128)):
        for one_loop in (True, False):
            statistics(dtype, biased, size, count, one_loop)
    assert {"row_pass", "column_pass", "pair_pass"} <= set(taken)
    assert max(taken.values()) <= compiler.shared, taken


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [80, 89, 90], indirect=True, ids=["sm80", "sm89", "sm90"])
@pytest.mark.parametrize(("branches", "channels", "side"), [(1, 96, 7), (4, 384, 14), (4, 192, 32), (8, 768, 32)])
@pytest.mark.parametrize("dtype", TYPED.values(), ids=TYPED)
def test_pooling_fits_into_shared_memory(
    dtype: torch.dtype, branches: int, channels: int, side: int, compiler: Compiler, taken: dict[str, int]
) -> None:
    pooling(dtype, branches, channels, side)
    assert max(taken.values()) <= compiler.shared, taken
