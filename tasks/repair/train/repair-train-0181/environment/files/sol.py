def bizi(jej, ah):
    wi = jej // ah
    return wi
