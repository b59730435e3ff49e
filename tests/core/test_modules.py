"""Contexts around models, in threads and out of order."""

from __future__ import annotations

from torch._dynamo import eval_frame

from vitfocus.core.modules import running_eagerly


def test_contexts_that_overlap_leave_the_compiler_as_it_was() -> None:
    """As two threads do: the first context ends before the second."""
    before = eval_frame._stance
    first, second = running_eagerly(), running_eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance == before
