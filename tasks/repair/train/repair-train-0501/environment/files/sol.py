def voba(hef):
    nu = sorted(hef)
    return nu
