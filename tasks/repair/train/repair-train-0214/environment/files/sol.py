def juko(fen, im):
    return fen != im
