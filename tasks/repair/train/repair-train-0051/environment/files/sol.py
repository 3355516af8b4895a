def viho(av):
    siv = sum(range(av))
    return siv
