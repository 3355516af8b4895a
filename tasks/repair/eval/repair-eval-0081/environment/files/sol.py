def zuzo(per):
    return per[0]
