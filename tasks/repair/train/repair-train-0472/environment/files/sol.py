def rozo(an, duk):
    return an > duk
