"""The growth of a process's peak of resident memory in a step."""

from tests.support import fresh

_MEASURE = """
import resource

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * resource.getpagesize() / 2**20

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

step({small})
# A past peak above the present size would hide growth: ballast fills the difference.
ballast = torch.ones(max(0, int(peak() - resident())) * 2**18)
before = peak()
step({large})
print(peak() - before)
"""


def growth(code: str, *arguments: str, small: int, large: int) -> float:
    """In MiB, of step(large) after step(small), in a process of its own. `code` imports torch and
    defines step(); `arguments` are its sys.argv[1:]."""
    measure = _MEASURE.format(small=small, large=large)
    return float(fresh.run(code + measure, *arguments, check=True).stdout)
