# Makes calls whose answers, flags, times and content must be equal on every btrfs, and prints a line for each. Run it in an
# empty directory.
import ctypes, errno, fcntl, mmap, os, struct, sys, time

GETFLAGS, SETFLAGS = 0x80086601, 0x40086602
C, IMMUTABLE, APPEND, NODUMP, NOCOMP, NOCOW = 0x4, 0x10, 0x20, 0x40, 0x400, 0x800000
libc = ctypes.CDLL(None, use_errno=True)

def tried(call, *arguments):
    try:
        result = call(*arguments)
        return 'ok' if result is None else result
    except OSError as error:
        return errno.errorcode[error.errno]

def make(name, data=b''):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, data)
    return fd

def get_flags(name):
    fd = os.open(name, os.O_RDONLY)
    flags = struct.unpack('<I', fcntl.ioctl(fd, GETFLAGS, b'\0' * 8)[:4])[0]
    os.close(fd)
    return hex(flags)

def set_flags(name, flags):
    fd = os.open(name, os.O_RDONLY)
    result = tried(lambda: fcntl.ioctl(fd, SETFLAGS, struct.pack('<Q', flags)) and None)
    os.close(fd)
    return result

def fallocate(fd, mode, offset, length):
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), '')

def changes(name, call):
    before = os.stat(name)
    time.sleep(0.02)
    result = tried(call)
    after = os.stat(name)
    return result, before.st_mtime_ns != after.st_mtime_ns, before.st_ctime_ns != after.st_ctime_ns

def map_file(fd, flags, prot):
    mmap.mmap(fd, 8192, flags=flags, prot=prot).close()

# Files that were opened before flags forbid changes.
for flag in IMMUTABLE, APPEND:
    fd = make('kept', b'a' * 8192)
    mapped = mmap.mmap(fd, 8192)
    mapped[0] = 98
    print('flag', hex(flag), set_flags('kept', flag))
    print('write', tried(os.pwrite, fd, b'zz', 100))
    mapped[4096] = 99
    print('msync', tried(mapped.flush), 'fsync', tried(os.fsync, fd))
    print('open', tried(os.open, 'kept', os.O_RDWR))
    content = open('kept', 'rb').read()
    print(len(content), content[0], content[4096], content[100:103])
    set_flags('kept', 0)
    os.rename('kept', 'kept-%x' % flag)

# Mapping an append-only file.
append = make('append', b'a' * 8192)
set_flags('append', APPEND)
both = mmap.PROT_READ | mmap.PROT_WRITE
for flags in os.O_RDWR | os.O_APPEND, os.O_RDONLY:
    fd = os.open('append', flags)
    for how, prot in (mmap.MAP_SHARED, both), (mmap.MAP_SHARED, mmap.PROT_READ), (mmap.MAP_PRIVATE, both):
        print('map', hex(flags), hex(how), prot, 'ok' if tried(map_file, fd, how, prot) == 'ok' else 'refused')
fd = os.open('append', os.O_RDWR | os.O_APPEND)
print('append', os.write(fd, b'x' * 5), os.fstat(fd).st_size, os.pread(fd, 10, 8190))
set_flags('append', 0)

# Copy-on-write and compression.
def prop(name, value):
    return tried(os.setxattr, name, 'btrfs.compression', value)

def state(name):
    return get_flags(name), tried(os.getxattr, name, 'btrfs.compression')

for data in b'', b'x' * 9000:
    number = 0
    for first in 0, C, NOCOMP, NOCOW, b'zstd', b'lzo', b'no':
        for second in 0, C, NOCOMP, NOCOW, C | NOCOW, NOCOMP | NOCOW, C | NOCOMP, C | NODUMP, NODUMP, b'zlib', b'no', b'':
            for kind in ('file', 'dir') if not data else ('file',):
                name = '%s-%d-%d' % (kind, len(data), number)
                number += 1
                if kind == 'dir':
                    os.mkdir(name)
                else:
                    os.close(make(name))
                results = []
                for step, value in enumerate((first, second)):
                    results.append(prop(name, value) if isinstance(value, bytes) else set_flags(name, value))
                    if step == 0 and data:
                        fd = os.open(name, os.O_WRONLY)
                        os.write(fd, data)
                        os.fsync(fd)
                        os.close(fd)
                print('flags', len(data), kind, first, second, results, state(name))

# Times.
fd = make('times', b'x' * 20000)
os.fsync(fd)
punch = lambda offset, length: changes('times', lambda: fallocate(fd, 3, offset, length))
print('truncate to the size', changes('times', lambda: os.truncate('times', 20000)))
print('ftruncate to the size', changes('times', lambda: os.ftruncate(fd, 20000)))
print('truncate', changes('times', lambda: os.truncate('times', 200000)))
print('data', punch(4096, 4096), 'again', punch(4096, 4096), 'a part', punch(5000, 100))
print('hole', punch(100000, 50000), 'in data', punch(100, 100), 'past the end', punch(303104, 4096))
print('over the end', punch(190000, 40960), 'hole and data', punch(6000, 8000))
print('zero', [changes('times', lambda: fallocate(fd, 16, 0, 4096)) for _ in range(2)])
print('allocate', [changes('times', lambda: fallocate(fd, mode, 0, 4096)) for mode in (1, 0)])
print('allocate more', changes('times', lambda: fallocate(fd, 0, 0, 400000)))
print('past the end', changes('times', lambda: fallocate(fd, 1, 500000, 4096)), punch(500000, 4096))
print('prealloc', punch(204800, 4096))
for size in 0, 100:
    fd = make('small', b'x' * size)
    os.fsync(fd)
    small = lambda call: changes('small', call)
    print('ftruncate', small(lambda: os.ftruncate(fd, size)), 'truncate', small(lambda: os.truncate('small', size)))
    print('whole', small(lambda: fallocate(fd, 3, 0, 4096)), 'again', small(lambda: fallocate(fd, 3, 0, 4096)))
    print('O_TRUNC', small(lambda: os.close(os.open('small', os.O_WRONLY | os.O_TRUNC))))

# Block counts of dirty data.
fd = make('sparse')
os.ftruncate(fd, 10 << 20)
blocks = lambda: os.fstat(fd).st_blocks
print('hole', blocks())
os.pwrite(fd, b'hello', 5 << 20)
print('written', blocks())
os.fsync(fd)
print('synced', blocks())
os.pwrite(fd, b'hallo', 5 << 20)
print('again', blocks())
os.pwrite(fd, b'z' * 10000, (5 << 20) - 5000)
print('wider', blocks())
os.ftruncate(fd, (5 << 20) + 1000)
print('cut', blocks())
fallocate(fd, 3, 0, 8 << 20)
print('punched', blocks())
fallocate(fd, 1, 0, 1 << 20)
os.pwrite(fd, b'a' * 8192, 4096)
print('preallocated', blocks())

# Files without a name.
O_TMPFILE = 0o20200000
os.mkdir('unnamed', 0o2770)
# Python follows the link in /proc only if a directory descriptor is given, which the absolute path does not use.
link = lambda fd, name: os.link('/proc/self/fd/%d' % fd, name, src_dir_fd=fd, follow_symlinks=True)
for number, flags in enumerate((os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_EXCL, os.O_RDONLY)):
    fd = tried(os.open, 'unnamed', O_TMPFILE | flags, 0o640)
    if isinstance(fd, str):
        print('O_TMPFILE', fd)
        continue
    print('O_TMPFILE', oct(os.fstat(fd).st_mode), os.fstat(fd).st_nlink, tried(os.write, fd, b'content' * 2000))
    print('fsync', tried(os.fsync, fd), os.listdir('unnamed'), os.fstat(fd).st_size)
    name = 'unnamed/named-%d' % number
    print('link', tried(lambda: link(fd, name)), os.fstat(fd).st_nlink)
    print('again', tried(lambda: link(fd, name)))
    os.close(fd)
    print(os.listdir('unnamed'), tried(os.unlink, name))
fd = os.open('unnamed', O_TMPFILE | os.O_RDWR, 0o600)
os.write(fd, b'kept')
link(fd, 'unnamed/kept')
os.unlink('unnamed/kept')
print('link after unlink', tried(lambda: link(fd, 'unnamed/kept')))
os.close(fd)
fd = os.open('unnamed', O_TMPFILE | os.O_RDWR, 0o600)
link(fd, 'unnamed/kept')
os.write(fd, b'written later')
print(open('unnamed/kept').read(), oct(os.stat('unnamed/kept').st_mode))

# Set-id bits, as a process without CAP_FSETID writes to an open file, or stores through a mapping of it.
FSETID = 1 << 4
for how in 'write', 'store':
    fd = make('set-id', b'x' * 8192)
    os.fchmod(fd, 0o6755)
    writer = os.fork()
    if writer == 0:
        header, sets = struct.pack('<Ii', 0x20080522, 0), ctypes.create_string_buffer(24)
        assert libc.capget(header, sets) == 0
        effective, permitted, *others = struct.unpack('<6I', sets.raw)
        assert libc.capset(header, struct.pack('<6I', effective & ~FSETID, permitted & ~FSETID, *others)) == 0
        if how == 'write':
            os.pwrite(fd, b'new', 100)
        else:
            mapped = mmap.mmap(fd, 8192)
            mapped[100:103] = b'new'
            mapped.flush()
        os._exit(0)
    failed = os.waitpid(writer, 0)[1]
    os.fsync(fd)
    print('set-id', how, failed, oct(os.fstat(fd).st_mode), os.pread(fd, 3, 100))
    os.close(fd)
    os.unlink('set-id')
