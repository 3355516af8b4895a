def vulo(je):
    uz = min(je)
    return uz
