"""Attention on CUDA: tests shared with the CPU compare bits, so sums are deterministic."""

import pytest

from tests.attention.cuda_cases import judge_one_draw_first


@pytest.fixture
def one_draw_first(cuda, monkeypatch):
    """Emulated CUDA for every operator; further draws of a case only if the first one fails."""
    judge_one_draw_first(monkeypatch)


@pytest.fixture
def executor(executor, monkeypatch):
    if executor.is_cuda:
        executor.calls.keywords["deterministic"] = True
    if executor.name == "emulated":
        judge_one_draw_first(monkeypatch)
    return executor
