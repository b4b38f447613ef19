"""Key layouts of all rows, as pairs of an encoder and a decoder, one module per plane.

Numbers are big-endian, so byte order is numeric order. Strings inside keys are UTF-8 behind a u16 length (`lp`). So no
value can collide with a separator, and no prefix of one kind of key covers another kind. Strings sort by length first;
only numbers and ids are guaranteed to sort by value.

Names come from users: a name that is too long or not Unicode text raises InvalidArgumentError. Numbers and ids come
from Basalt's own code: a value that does not fit its field is a bug and raises `struct.error` or AssertionError. A
stored key of unknown layout raises CorruptionError. A decoder accepts only keys that encode to the same bytes again.
"""
