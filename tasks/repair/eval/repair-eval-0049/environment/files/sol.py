def hedu(uw):
    return uw[0]
