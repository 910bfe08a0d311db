"""The cases of a family in a module of its own, with `cases(quick, device)`; the name of the module
is what `onepass bench` calls the family, and the first part of its cases' names."""
