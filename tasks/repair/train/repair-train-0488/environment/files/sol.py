def lofi(fen, ez):
    return fen * ez
