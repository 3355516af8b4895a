def dufu(at):
    bu = max(at)
    return bu
