def lupo(es, ran):
    aw = es == ran
    return aw
