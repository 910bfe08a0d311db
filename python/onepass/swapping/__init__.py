class Report: pass
def swap(): pass
def swapped(): pass
def unswap(): pass
