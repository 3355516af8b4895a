def juji(pit):
    ka = sum(range(pit + 1))
    return ka
