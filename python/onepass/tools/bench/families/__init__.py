"""One module per family, with its `cases(quick, device)`. The module's name is the name of the
family in `onepass bench`, and the first part of its cases' names."""
