//! Tests of listings, which bring the attributes of an entry only to programs that use them.
//!
//! Method: this process serves a mount in memory with directories that have more files than a program without a history
//! gets attributes of. Programs in other processes list them, and the server's own counts tell how many names the
//! kernel looked up afterwards.

use ubtrfs_fs::{Caller, Fs, NewInode};
use ubtrfs_fuse::MountConfig;
use ubtrfs_fuse::transport::Transport;

use crate::requests::{Mount, can_run, of, python, shared};

/// Files in a directory: a program that uses no attributes gets those of less than a half.
const FILES: usize = 40_000;

/// Makes the directories with these names, each with [`FILES`] empty files.
fn make_dirs(fs: &Fs, names: &[&str]) {
    for name in names {
        let dir = fs.create(fs.root(), name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
        for nr in 0..FILES {
            let file = fs.create(dir, format!("f{nr}").as_bytes(), NewInode::file(0o640), &Caller::ROOT).unwrap();
            fs.forget(file.id, 1);
        }
        fs.forget(dir, 1);
    }
}

fn mount(config: MountConfig, names: &[&str]) -> Mount {
    Mount::prepared(config, |fs| make_dirs(fs, names))
}

/// A program that lists directories without looking at the files.
const LIST: &str = "import os\nfor d in 'ab': assert len(os.listdir(d)) == 40000\n";

#[test]
fn a_program_that_uses_attributes_gets_them_with_the_names() {
    if !can_run() {
        return;
    }
    for transport in [Transport::DevFuse, Transport::Auto] {
        let mount = mount(MountConfig { transport, ..shared() }, &["a", "b"]);
        let program = "import os\nfor d in 'ab':\n for e in os.scandir(d): assert e.stat().st_mode == 0o100640\n";
        let requests = mount.requests_of(program);
        assert!(of(&requests, "lookup") < 2000, "{requests:?}");
        mount.end();
    }
}

#[test]
fn a_program_that_uses_attributes_late_gets_those_of_the_next_directory() {
    if !can_run() {
        return;
    }
    let mount = mount(shared(), &["a", "b", "c"]);
    let program = "import os\nfor d in 'abc':\n for f in os.listdir(d): os.stat(d + '/' + f)\n";
    let requests = mount.requests_of(program);
    let lookups = of(&requests, "lookup");
    assert!((20_000..30_000).contains(&lookups), "of the first directory only: {requests:?}");
    mount.end();
}

#[test]
fn names_listed_without_attributes_are_looked_up_when_they_are_used() {
    if !can_run() {
        return;
    }
    for transport in [Transport::DevFuse, Transport::Auto] {
        let mount = mount(MountConfig { transport, ..shared() }, &["a", "b"]);
        assert!(of(&mount.requests_of(LIST), "lookup") < 10);
        // Everything that happens to the files after the listing is seen, through the names that the kernel keeps.
        let requests = mount.requests_of(
            r"
import errno, os, stat, struct
names = os.listdir('b')
inos = {e.name: e.inode() for e in os.scandir('b')}
os.chmod('b/f39990', 0o600)
os.chown('b/f39991', 7, 8)
open('b/f39992', 'wb').write(b'content')
os.remove('b/f39993')
os.rename('b/f39994', 'b/new')
os.remove('b/f39995'); os.mkdir('b/f39995')
os.setxattr('b/f39996', 'user.x', b'value')
acl = struct.pack('<I' + 'HHI' * 5, 2, 1, 6, 2**32 - 1, 2, 4, 7, 4, 0, 2**32 - 1, 16, 4, 2**32 - 1, 32, 0, 2**32 - 1)
os.setxattr('b/f39997', 'system.posix_acl_access', acl)
def fails(number, call):
    try: call()
    except OSError as error: assert error.errno == number, error
    else: raise SystemExit('no error')
for name in names:
    path = 'b/' + name
    if name in ('f39993', 'f39994'):
        fails(errno.ENOENT, lambda: os.stat(path))
        continue
    found = os.lstat(path)
    if name == 'f39995':
        assert stat.S_ISDIR(found.st_mode)
        continue
    assert found.st_ino == inos[name], name
    mode = {'f39990': 0o600}.get(name, 0o640)
    assert found.st_mode == stat.S_IFREG | mode, (name, oct(found.st_mode))
    assert (found.st_uid, found.st_gid) == ((7, 8) if name == 'f39991' else (0, 0)), name
    assert found.st_size == (7 if name == 'f39992' else 0), name
assert os.getxattr('b/f39996', 'user.x') == b'value'
fails(errno.ENODATA, lambda: os.getxattr('b/f39998', 'user.x'))
assert os.getxattr('b/f39997', 'system.posix_acl_access') == acl
if os.fork() == 0:
    os.setgroups([]); os.setgid(7); os.setuid(7)
    open('b/f39997', 'rb').close()
    fails(errno.EACCES, lambda: open('b/f39998', 'rb'))
    fails(errno.EACCES, lambda: open('b/f39997', 'r+b'))
    os._exit(0)
assert os.wait()[1] == 0
",
        );
        assert!(of(&requests, "lookup") > 20_000, "names alone were listed: {requests:?}");
        mount.end();
    }
}

#[test]
fn a_list_of_names_is_not_kept_once_a_program_uses_attributes() {
    if !can_run() {
        return;
    }
    let mount = mount(shared(), &["a", "b", "c"]);
    let lists = "import os\nfor d in 'abc': assert len(os.listdir(d)) == 40000\n";
    assert!(of(&mount.requests_of(lists), "lookup") < 10);
    let walks = "import os\nfor d in 'abc':\n for e in os.scandir(d): assert e.stat().st_mode == 0o100640\n";
    let requests = mount.requests_of(walks);
    assert!(of(&requests, "lookup") < 5000, "{requests:?}");
    assert!(of(&requests, "readdirplus") > 300, "{requests:?}");
    assert!(of(&mount.requests_of(walks), "lookup") < 2000);
    mount.end();
}

#[test]
fn a_listing_shows_nothing_to_users_who_may_not_search_the_directory() {
    if !can_run() || !rustix::process::geteuid().is_root() {
        return;
    }
    let mount = mount(shared(), &["a", "b"]);
    python(mount.path(), "import os\nos.chmod('a', 0o754)\nos.chmod('.', 0o755)\nos.chmod('b', 0o750)\n");
    python(
        mount.path(),
        r"
import errno, os
os.setgroups([]); os.setgid(1000); os.setuid(1000)
def fails(call):
    try: call()
    except OSError as error: assert error.errno == errno.EACCES, error
    else: raise SystemExit('no error')
for _ in range(2):
    names = os.listdir('a')
    assert len(names) == 40000
    for name in names[::100]:
        fails(lambda: os.lstat('a/' + name))
    fails(lambda: os.listdir('b'))
",
    );
    mount.end();
}
