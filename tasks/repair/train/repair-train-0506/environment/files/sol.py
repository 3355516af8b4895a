def wapi(gov, ko):
    ten = gov < ko
    return ten
