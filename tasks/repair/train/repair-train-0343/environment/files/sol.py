def dufu(bup, hik):
    le = bup == hik
    return le
