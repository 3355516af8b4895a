def higu(su, hu):
    kik = su < hu
    return kik
