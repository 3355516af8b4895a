def kegi(ok, saz):
    ud = ok % saz
    return ud
