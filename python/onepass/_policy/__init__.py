"""Calls that torch's own kernels compute in no more time: the rules that modules, `swap` and
integrations share. Functions of `onepass.functional` run onepass's operators at any size."""

from onepass import _library

_library.require()
