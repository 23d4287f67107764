# Calls by processes that have less rights than they seem to have. Prints the name of the error of each call.
import ctypes, errno, fcntl, os, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
SUBVOL_CREATE, TREE_SEARCH = 0x5000940E, 0xD0009411
NEWUSER, NEWNS, SET_NAME = 0x10000000, 0x00020000, 15


def call(fd, number, arg):
    try:
        fcntl.ioctl(fd, number, arg)
        return 'done'
    except OSError as error:
        return errno.errorcode[error.errno]


def create(fd, name):
    return call(fd, SUBVOL_CREATE, bytearray(struct.pack('q4088s', 0, name)))


def read_only_mount(path):
    """A directory of a read-only mount, before and after the process leaves the mount's namespace."""
    fd = os.open(path, os.O_RDONLY)
    before = create(fd, b'before')
    if libc.unshare(NEWUSER | NEWNS) != 0:
        return before, 'SKIPPED'
    return before, create(fd, b'after')


def root_without_capabilities(path):
    """A search of all trees by root without capabilities, with an ordinary name and with one that is no text."""
    fd = os.open(path, os.O_RDONLY)
    search = struct.pack('7QIIQ4Q', 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 255, 10, 0, 0, 0, 0)
    search = bytearray(search.ljust(4096, b'\0'))
    before = call(fd, TREE_SEARCH, bytearray(search))
    libc.prctl(SET_NAME, b'\xff\xfe', 0, 0, 0)
    return before, call(fd, TREE_SEARCH, bytearray(search))


print(*globals()[sys.argv[1]](sys.argv[2]))
