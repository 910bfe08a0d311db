from onepass import _library

_library.require()
