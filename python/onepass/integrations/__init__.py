"""onepass by other libraries' names and switches. `import onepass` imports none of it; `swap` does
if the library has been imported.
"""
