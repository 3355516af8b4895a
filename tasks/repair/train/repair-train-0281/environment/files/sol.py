def wohu(ut):
    sir = sum(ut)
    return sir
