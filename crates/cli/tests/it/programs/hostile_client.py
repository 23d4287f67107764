# Clients of a mount's control socket that stop halfway. Each prints "ready" and stays until its standard input ends.
# Usage: hostile_client.py MANNER DIR [FILE]
import array, json, os, socket, struct, sys, threading, time

manner, where = sys.argv[1:3]
dir_fd = os.open(where, os.O_RDONLY)
name = os.getxattr(where, 'ubtrfs.control')
RECEIVE = {'receive': {'dir': 0, 'only_first': False, 'max_errors': 1, 'keep': False, 'force_decompress': False,
                       'verify': False, 'total_bytes': None}}
USAGE = {'disk_usage': {'of': 0, 'names': True}}


def ask(request, files, streams=True):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(b'\0' + name)
    message = json.dumps({'version': 1, 'streams': streams, 'files': files, 'request': request}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', files))]
    connection.sendmsg([struct.pack('<I', len(message)) + message], rights)
    return connection


def answer(connection):
    length, = struct.unpack('<I', connection.recv(4, socket.MSG_WAITALL))
    return connection.recv(length, socket.MSG_WAITALL)


def stops_reading():
    """A stream of which a part is read."""
    connection = ask(USAGE, [dir_fd])
    assert connection.recv(1000)
    return connection


def stops_sending():
    """A stream that ends in a frame."""
    connection = ask(RECEIVE, [dir_fd])
    assert answer(connection) == b'"ready"'
    connection.sendall(struct.pack('<I', 1000) + b'btrfs-stream')
    return connection


def sends_its_pipe():
    """A pipe for the stream, whose flags change all the time."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    connection = ask(USAGE, [dir_fd, writer], streams=False)

    def flip():
        while True:
            os.set_blocking(writer, True)
            os.set_blocking(writer, False)

    threading.Thread(target=flip, daemon=True).start()
    return connection, reader


def sends_a_silent_file():
    """A file of a FUSE server that answers no more."""
    silent = os.open(sys.argv[3], os.O_RDWR)
    print('opened', flush=True)
    sys.stdin.readline()
    return ask({'filesystem': 'info'}, [silent], streams=False)


held = globals()[manner]()
# Only the server keeps the mount busy from now on.
os.close(dir_fd)
time.sleep(1)
print('ready', flush=True)
sys.stdin.read()
