"""The tier: features that other machines have made, by way of a store that they share.

A mover (`mmbroker tier`), one for each broker and namespace, is an ordinary client. What nobody here has is promised to
it first: it fetches the feature into a lease, or gives the promise back. What is made here and worth it, it stores. The
broker moves no bytes, and speaks to no store; the mover's death is the end of a session.

    objects     what a feature is in the store: its name, its header, how it is verified
    policy      what is stored, and when
    breaker     when the store is left alone
    store       a store of objects, and Mooncake's
    doorman     keeps the store's own listeners to one address
    registry    the segments and scratch memory that the store may touch
    desk        the mover's side of the broker: what it was promised, told and granted
    way         what both ways need
    fetch, keep the way of a feature from the store, and to it
    mover       all of it together
"""
