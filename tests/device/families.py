"""The families that have CUDA kernels, also for programs that must not import torch."""

FAMILIES = ("norm", "modulated_norm", "dropout", "gate", "group_norm", "loss", "rotary")
FAMILIES += ("attention_decode", "attention", "optimizer")
