"""onepass by other libraries' names and switches. `import onepass` imports none of it; `swap` does
where the library is imported already.
"""
