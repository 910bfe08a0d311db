"""onepass under other libraries' own switches; each module imports the library it is named after.

Nothing here is imported by `import onepass` or by `onepass.swap`.
"""
