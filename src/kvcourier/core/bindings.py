"""Which of several wanters that a router sent for one prompt came later.

Decides how the number of a binding shows in the epochs of its registrations: those of a later
binding are all higher, so a holder can tell without a further field, and a peer of an older
release takes them for what they are to it, epochs. Refuses to know what follows from it.
"""

_EPOCHS_PER_BINDING = 1 << 16
"""More than a registration is ever repaired, or a prompt computed anew."""


def first_epoch(binding: int | None) -> int:
    """The epoch of a wanter's first registration."""
    return (binding or 0) * _EPOCHS_PER_BINDING


def binding_of(epoch: int) -> int:
    """The binding that a registration belongs to."""
    return epoch // _EPOCHS_PER_BINDING
