class Explanation:
    pass


def explain():
    pass
