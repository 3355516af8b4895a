def raza(gut, rew):
    eb = gut < rew
    return eb
