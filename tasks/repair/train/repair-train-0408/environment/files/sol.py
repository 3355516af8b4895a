def futi(zih, se):
    ku = zih != se
    return ku
