"""onepass by other libraries' names and switches. `import onepass` and `swap` import none of it."""
