def nali(sa, ud):
    return sa - ud
