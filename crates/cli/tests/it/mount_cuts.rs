//! Power cuts of a whole mounted server under real programs.
//!
//! Method: this process serves an image file through FUSE, over a device that records every write and flush. The program
//! `ubtrfs` mounts that image, so all of its own I/O is recorded, with its rings, threads and direct I/O. In the mount,
//! four programs run at once: one replaces files and fsyncs them, one commits to SQLite, one commits to git, and one makes
//! changes without promises. If `FSSTRESS` names the program fsstress (of xfstests or LTP), it runs, too. A program waits after each promise until the recording has noted it. Then the power is cut at
//! points of the recording, and each time:
//!
//! - `ubtrfs check` finds the image clean.
//! - Every replaced file has the content of its last promise, or of a later one.
//! - For a sample, SQLite finds its database intact with every committed row, and git its repository with every commit.
//!
//! Requests come through /dev/fuse in one run, and in rings of io_uring in the other, where the kernel has them.
//! `UBTRFS_CUTS=10000` makes more cuts; `UBTRFS_SEED` chooses others.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;
use ubtrfs_device::Device;
use ubtrfs_fs::MountOptions;
use ubtrfs_fuse::protocol::{EntryReply, Features, FuseAttr, FuseRequest, InitLimits, Operation, Reply, Statfs};
use ubtrfs_fuse::transport::{Config, Connection, Handler, IdlePolling, Transport, WorkerPlace};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, CutOutcome, FsTarget, LoopMount, Medium, MediumDevice, NodeKind, RecordingDevice, Rng, Target,
    btrfs_check, capability, check_medium, compare_entries, walk_path,
};

/// The lanes of promises.
const FILES: usize = 0;
const SQLITE: usize = 1;
const GIT: usize = 2;
const NR_FILES: u64 = 16;

/// Replaces files: writes a new one, fsyncs it, renames it over the old one, fsyncs the directory. File `n % 16` then has
/// the content of round `n`.
const REPLACER: &str = r"
import os, sys
os.mkdir('files')
directory = os.open('files', os.O_RDONLY)
n = 0
while True:
    n += 1
    name, text = 'files/f%d' % (n % 16), b'%016d' % n * (1 + n * 37 % 3000)
    fd = os.open('files/new', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, text)
    os.fsync(fd)
    os.close(fd)
    os.rename('files/new', name)
    os.fsync(directory)
    print(0, n, flush=True)
    if not sys.stdin.readline(): break
";

/// Commits rows to two databases in turn, one with a rollback journal and one with a write-ahead log.
const DATABASE: &str = r"
import os, sqlite3, sys
os.mkdir('db')
dbs = []
for mode in ('delete', 'wal'):
    db = sqlite3.connect('db/' + mode, isolation_level=None)
    db.execute('pragma journal_mode=' + mode)
    # With less, SQLite does not sync the removal of the journal, which is the commit.
    db.execute('pragma synchronous=extra')
    db.execute('create table t(n integer primary key, text)')
    dbs.append(db)
directory = os.open('db', os.O_RDONLY)
os.fsync(directory)
n = 0
while True:
    n += 1
    db = dbs[n % 2]
    db.execute('begin')
    for k in range(4):
        db.execute('insert into t values(?, ?)', (n * 4 + k, 'x' * (n * 71 % 1500)))
    if n > 20:
        db.execute('delete from t where n < ?', ((n - 20) * 4,))
    db.execute('commit')
    print(1, n, flush=True)
    if not sys.stdin.readline(): break
";

/// Makes commits, whose objects and references git fsyncs.
const GIT_COMMITS: &str = r"
import os, subprocess, sys
os.mkdir('repo')
def git(*args):
    subprocess.run(['git', '-C', 'repo', '-c', 'core.fsync=all', '-c', 'core.fsyncMethod=fsync', '-c', 'gc.auto=0',
        '-c', 'user.name=n', '-c', 'user.email=e', *args], check=True, stdout=subprocess.DEVNULL)
git('init', '-q', '-b', 'main')
def sync(name):
    fd = os.open(name, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
# git does not sync what it makes here.
for path, dirs, files in os.walk('repo'):
    for name in [path] + [path + '/' + file for file in files]: sync(name)
n = 0
while True:
    n += 1
    open('repo/file%d' % (n % 5), 'w').write('line\n' * n)
    git('add', '-A')
    git('commit', '-q', '-m', str(n))
    # git syncs objects and references under temporary names, but not their renames.
    for path, dirs, files in os.walk('repo/.git/objects'): sync(path)
    sync('repo/.git/refs/heads')
    print(2, n, open('repo/.git/refs/heads/main').read().strip(), flush=True)
    if not sys.stdin.readline(): break
";

/// Changes files without promises: writes, truncates, maps, links, renames, deletes, and sometimes syncs.
const NOISE: &str = r"
import mmap, os, random, sys
random.seed(int(sys.argv[1]))
os.mkdir('noise')
def name(): return 'noise/%d' % random.randrange(40)
while True:
    try:
        what = random.randrange(9)
        if what < 4:
            fd = os.open(name(), os.O_RDWR | os.O_CREAT, 0o644)
            os.pwrite(fd, random.randbytes(random.randrange(1, 60000)), random.randrange(0, 200000))
            if what == 0: os.fsync(fd)
            if what == 1 and os.fstat(fd).st_size > 4096:
                with mmap.mmap(fd, 0) as map: map[100:200] = bytes(100)
            os.close(fd)
        elif what == 4: os.truncate(name(), random.randrange(0, 100000))
        elif what == 5: os.rename(name(), name())
        elif what == 6: os.link(name(), name())
        elif what == 7: os.unlink(name())
        else: os.setxattr(name(), 'user.x', random.randbytes(random.randrange(1, 2000)))
    except OSError:
        pass
";

/// Answers for each directory with a copy of `db` the greatest row of both databases, or the problem.
const DATABASE_JUDGE: &str = r"
import sqlite3, sys
for line in sys.stdin:
    greatest = []
    try:
        for mode in ('delete', 'wal'):
            db = sqlite3.connect(line.strip() + '/' + mode)
            ok = db.execute('pragma integrity_check').fetchall()
            if ok != [('ok',)]: raise Exception(str(ok))
            greatest.append(str(db.execute('select max(n) from t').fetchone()[0] or 0))
            db.close()
        print(' '.join(greatest), flush=True)
    except Exception as e:
        print('problem:', mode, str(e).replace('\n', ' '), flush=True)
";

/// Shows a recording device as the file `image`.
struct ImageServer(Arc<RecordingDevice>);

const ROOT: u64 = 1;
const IMAGE: u64 = 2;

impl ImageServer {
    fn attr(&self, ino: u64) -> FuseAttr {
        let (mode, size) = if ino == ROOT { (0o040_755, 0) } else { (0o100_644, self.0.len_bytes()) };
        FuseAttr { ino, mode, size, nlink: 1, blksize: 4096, ..FuseAttr::default() }
    }
}

/// The error that the device reports, for the kernel.
fn io<T>(done: std::io::Result<T>) -> Result<T, Errno> {
    done.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

impl Handler for ImageServer {
    fn handle(&self, req: &FuseRequest<'_>, reply: &mut Reply<'_>, _place: &WorkerPlace<'_>) -> Result<(), Errno> {
        const TTL: Duration = Duration::from_secs(60);
        // FOPEN_DIRECT_IO, FOPEN_PARALLEL_DIRECT_WRITES
        const OPEN_FLAGS: u32 = 1 | 1 << 6;
        const PUNCH_HOLE_KEEP_SIZE: u32 = 3;
        match req.operation {
            Operation::Lookup { name: b"image" } => reply.entry(&EntryReply {
                node: IMAGE,
                attr: self.attr(IMAGE),
                ttl: TTL,
                attr_ttl: TTL,
                ..EntryReply::default()
            }),
            Operation::Lookup { .. } => return Err(Errno::NOENT),
            Operation::Getattr | Operation::Setattr(_) => reply.attr(TTL, &self.attr(req.node)),
            Operation::Open { .. } => reply.opened(0, if req.node == IMAGE { OPEN_FLAGS } else { 0 }),
            Operation::Read { offset, size } => {
                let len = self.0.len_bytes().saturating_sub(offset).min(size.into());
                reply.fill(len as usize, |room| io(self.0.read_at(offset, room).map(|()| room.len())))?;
            }
            Operation::Write { offset, data, .. } => {
                io(self.0.write_at(offset, data))?;
                reply.written(data.len() as u32);
            }
            Operation::Fsync { .. } => io(self.0.flush())?,
            Operation::Fallocate { offset, length, mode: PUNCH_HOLE_KEEP_SIZE } => io(self.0.discard(offset, length))?,
            Operation::Release { .. } | Operation::Fsyncdir { .. } => {}
            Operation::Statfs => reply.statfs(&Statfs {
                blocks: 1 << 30,
                bfree: 1 << 30,
                bavail: 1 << 30,
                bsize: 4096,
                frsize: 4096,
                namelen: 255,
                ..Statfs::default()
            }),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn forget(&self, _node: u64, _count: u64) {}
}

/// A directory with the file `image`.
struct ImageMount {
    dir: TempDir,
    server: Option<JoinHandle<()>>,
}

impl ImageMount {
    fn new(device: Arc<RecordingDevice>) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-recorded-").unwrap();
        let requests: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap().into();
        let data = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", requests.as_raw_fd()).into_bytes();
        let data = std::ffi::CStr::from_bytes_with_nul(&data).unwrap();
        rustix::mount::mount("recorded", dir.path(), "fuse", MountFlags::empty(), data).unwrap();
        let config = Config {
            features: Features::empty(),
            limits: InitLimits { max_write: 1 << 20, max_background: 64 },
            transport: Transport::DevFuse,
            nr_threads: 4,
            idle_poll: IdlePolling::default(),
        };
        let server = thread::spawn(move || {
            Connection::open(requests, &config).unwrap().serve(ImageServer(device)).unwrap();
        });
        Self { dir, server: Some(server) }
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }
}

impl Drop for ImageMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

fn python(code: &str, arg: u64, dir: &Path) -> Child {
    let mut command = Command::new("python3");
    command.args(["-c", code, &arg.to_string()]).current_dir(dir);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Runs a program until `end` and notes its promises, and the names of the commits that git promised.
fn run_and_mark(mut child: Child, device: &RecordingDevice, commits: &Mutex<Vec<String>>, end: Instant) {
    let mut go_on = child.stdin.take().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if let Some(hash) = words.get(2) {
            commits.lock().unwrap().push((*hash).to_owned());
        }
        device.mark_lane(words[0].parse().unwrap(), words[1].parse().unwrap());
        if Instant::now() >= end {
            break;
        }
        go_on.write_all(b"\n").unwrap();
    }
    drop(go_on);
    assert!(child.wait().unwrap().success());
}

/// Runs fsstress again and again until `end`. After each round, most of its files are deleted, so that the filesystem does
/// not fill up. Its read-only snapshots remain.
fn stress(program: &Path, seed: u64, dir: &Path, end: Instant) {
    let mut rounds = 0;
    while Instant::now() < end {
        rounds += 1;
        let mut command = Command::new(program);
        let dir = dir.join(rounds.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        command.arg("-d").arg(&dir).args(["-n", "300", "-p", "2", "-s", &(seed + rounds).to_string()]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "fsstress: {}", String::from_utf8_lossy(&output.stderr));
        let _ = std::fs::remove_dir_all(&dir);
    }
    println!("{rounds} rounds of fsstress");
}

/// Mounts the recorded image, runs the programs, and unmounts.
fn record(options: &str, seed: u64, duration: Duration) -> (Arc<RecordingDevice>, Vec<String>) {
    let base = Medium::formatted(1 << 30, &MkfsOptions::default()).unwrap();
    let device = Arc::new(RecordingDevice::new(base));
    let image = ImageMount::new(device.clone());
    let dir = TempDir::with_prefix("ubtrfs-cuts-").unwrap();
    let mount = crate::common::text(dir.path());
    // The server must not map its own image: the image is a file of this process.
    crate::common::ok(crate::common::ubtrfs(["mount", "-o", options, &crate::common::text(&image.image()), &mount]));
    let end = Instant::now() + duration;
    let mut noise = python(NOISE, seed, dir.path());
    let commits = Mutex::new(Vec::new());
    let fsstress = std::env::var_os("FSSTRESS").map(PathBuf::from);
    thread::scope(|scope| {
        if let Some(program) = &fsstress {
            scope.spawn(|| stress(program, seed, &dir.path().join("stress"), end));
        }
        for code in [REPLACER, DATABASE, GIT_COMMITS] {
            let (device, commits, dir) = (&device, &commits, dir.path());
            scope.spawn(move || run_and_mark(python(code, seed, dir), device, commits, end));
        }
    });
    noise.kill().unwrap();
    noise.wait().unwrap();
    crate::common::ok(crate::common::ubtrfs(["umount", &mount]));
    (device, commits.into_inner().unwrap())
}

/// The numbers of checks, by kind.
type Counts = BTreeMap<&'static str, usize>;

/// Checks what a power cut left.
fn check_cut(
    medium: &Medium,
    outcome: &CutOutcome,
    is_sampled: bool,
    commits: &[String],
    databases: &Mutex<(Child, BufReader<std::process::ChildStdout>)>,
) -> anyhow::Result<Counts> {
    let mut counts = Counts::new();
    check_medium(medium)?;
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(medium.clone()));
    let mut target = FsTarget::on_device(device, MountOptions::default())?;
    if let Some(promised) = outcome.promised_by[FILES] {
        for file in 0..NR_FILES {
            let oldest = promised.checked_sub((promised + NR_FILES - file) % NR_FILES).filter(|round| *round > 0);
            let Some(oldest) = oldest else { continue };
            let name = format!("files/f{file}");
            let content = target.read(name.as_bytes(), 0, 1 << 20);
            let content = content.map_err(|errno| anyhow::anyhow!("{name}, promised by round {oldest}: {errno}"))?;
            let round: u64 = std::str::from_utf8(content.get(..16).context("short")?)?.parse()?;
            let expected = format!("{round:016}").repeat(usize::try_from(1 + round * 37 % 3000)?);
            ensure!(content == expected.as_bytes(), "{name} of round {round} has {} wrong bytes", content.len());
            // The round after the last promise may have been made durable, too.
            ensure!(
                round % NR_FILES == file && (round == oldest || round == promised + 1),
                "{name} is of round {round}, promised was {oldest} (all up to {promised})"
            );
            *counts.entry("files").or_default() += 1;
        }
    }
    if is_sampled {
        if let Some(promised) = outcome.promised_by[SQLITE] {
            let dir = TempDir::new()?;
            extract(&mut target, "db", dir.path())?;
            let mut judge = databases.lock().unwrap();
            writeln!(judge.0.stdin.as_mut().unwrap(), "{}", dir.path().display())?;
            let mut line = String::new();
            judge.1.read_line(&mut line)?;
            let rows: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
            ensure!(rows.len() == 2, "SQLite: {line}");
            for (db, greatest) in rows.iter().enumerate() {
                // Rounds with this remainder went to this database.
                let last = if promised % 2 == db as u64 { promised } else { promised - 1 };
                ensure!(
                    last == 0 || *greatest >= last * 4 + 3,
                    "database {db} ends with row {greatest}, promised {last}"
                );
            }
            *counts.entry("databases").or_default() += 1;
        }
        if let Some(promised) = outcome.promised_by[GIT] {
            let dir = TempDir::new()?;
            extract(&mut target, "repo", dir.path())?;
            let git = |args: &[&str]| -> anyhow::Result<String> {
                let output = Command::new("git").arg("-C").arg(dir.path()).args(args).output()?;
                ensure!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
                Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
            };
            let commit = &commits[usize::try_from(promised)? - 1];
            git(&["archive", "--output=/dev/null", commit])?;
            let nr_commits: u64 = git(&["rev-list", "--count", "--objects", commit])?.parse()?;
            ensure!(nr_commits >= promised, "git has {nr_commits} objects, promised {promised} commits");
            // The reference may name a commit that was not promised, whose objects may be missing: git does not sync the
            // names of objects before it renames the reference.
            let main = std::fs::read_to_string(dir.path().join(".git/refs/heads/main"))?;
            let at = commits.iter().position(|commit| *commit == main.trim());
            ensure!(at.is_none_or(|at| at as u64 + 1 >= promised), "main is at commit {at:?}, promised {promised}");
            ensure!(main.trim().len() == 40, "main is {main:?}");
            *counts.entry("repositories").or_default() += 1;
        }
    }
    target.close()?;
    Ok(counts)
}

/// Copies a directory out of a filesystem.
fn extract(target: &mut FsTarget, dir: &str, to: &Path) -> anyhow::Result<()> {
    for entry in target.walk()? {
        let path = String::from_utf8(entry.path.clone())?;
        let path = path.trim_start_matches('/');
        let Some(inner) = path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/')) else { continue };
        match entry.kind {
            NodeKind::Directory => std::fs::create_dir_all(to.join(inner))?,
            NodeKind::File => {
                std::fs::create_dir_all(to.join(inner).parent().context("parent")?)?;
                let content = target.read(path.as_bytes(), 0, 64 << 20);
                std::fs::write(to.join(inner), content.map_err(|errno| anyhow::anyhow!("{path}: {errno}"))?)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Cuts the power at points of a recording, and checks each outcome on several threads.
fn cut_and_check(device: &RecordingDevice, commits: &[String], nr_cuts: usize, seed: u64) -> Counts {
    let mut rng = Rng::new(seed);
    let marks = device.mark_points(FILES..GIT + 1);
    let mut points: Vec<usize> = (0..nr_cuts)
        .map(|nr| match nr % 3 {
            // Promises are the points where a lost write shows.
            0 if !marks.is_empty() => marks[rng.below(marks.len() as u64) as usize] + rng.below(3) as usize,
            _ => rng.below(device.events() as u64 + 1) as usize,
        })
        .map(|point| point.min(device.events()))
        .collect();
    points.sort_unstable();
    let sample = (nr_cuts / 40).max(1);
    let nr_linux = if capability::kernel_oracle() { 3 } else { 0 };
    let mut builder = device.cuts();
    let (send, receive) = mpsc::sync_channel::<(usize, usize, Medium, CutOutcome)>(2);
    let receive = Mutex::new(receive);
    let mut judge_process = python(DATABASE_JUDGE, 0, Path::new("/"));
    let answers = BufReader::new(judge_process.stdout.take().unwrap());
    let databases = Mutex::new((judge_process, answers));
    let (counts, failures) = (Mutex::new(Counts::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Ok((nr, point, medium, outcome)) = receive.lock().unwrap().recv() else { return };
                    let by_linux = nr_linux > 0 && nr.is_multiple_of(nr_cuts / nr_linux + 1);
                    let found = check_cut(&medium, &outcome, nr.is_multiple_of(sample), commits, &databases);
                    let found = found.and_then(|found| if by_linux { by_linux_too(&medium, found) } else { Ok(found) });
                    let mut counts = counts.lock().unwrap();
                    *counts.entry("cuts").or_default() += 1;
                    match found {
                        Ok(found) => {
                            found.into_iter().for_each(|(kind, count)| *counts.entry(kind).or_default() += count)
                        }
                        Err(error) => failures
                            .lock()
                            .unwrap()
                            .push(format!("seed {seed}, cut {nr} at event {point}, {outcome:?}: {error:#}")),
                    }
                }
            });
        }
        for (nr, point) in points.into_iter().enumerate() {
            let (medium, outcome) = builder.cut(point, &mut rng);
            if send.send((nr, point, medium, outcome)).is_err() {
                break;
            }
        }
        drop(send);
    });
    let (mut judge_process, _) = databases.into_inner().unwrap();
    drop(judge_process.stdin.take());
    judge_process.wait().unwrap();
    let (counts, failures) = (counts.into_inner().unwrap(), failures.into_inner().unwrap());
    assert!(failures.is_empty(), "{} of {counts:?} are bad, the first: {}", failures.len(), failures[0]);
    counts
}

/// Lets Linux check and mount what a power cut left.
fn by_linux_too(medium: &Medium, mut counts: Counts) -> anyhow::Result<Counts> {
    let image = tempfile::NamedTempFile::new()?;
    medium.save(image.path())?;
    let target = FsTarget::on_device(Arc::new(MediumDevice::new(medium.clone())), MountOptions::default())?;
    let ours = target.walk()?;
    target.close()?;
    btrfs_check(image.path())?;
    let mount = LoopMount::new(image.path(), "")?;
    compare_entries(&ours, &walk_path(mount.path())?, Compare { root: false, ..Compare::ALL })
        .context("our replay (first) and Linux's (second) differ")?;
    mount.close()?;
    btrfs_check(image.path()).context("after Linux's replay")?;
    *counts.entry("judged by Linux").or_default() += 1;
    Ok(counts)
}

fn cuts(options: &str) {
    if !capability::root() || !capability::fuse() || !["python3", "git"].into_iter().all(capability::program) {
        return;
    }
    let nr_cuts = std::env::var("UBTRFS_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(150);
    let seed = Rng::seed_or(1);
    let duration = if nr_cuts > 1000 { Duration::from_secs(20) } else { Duration::from_secs(4) };
    let (device, commits) = record(options, seed, duration);
    let flushes = device.flush_points().len();
    let counts = cut_and_check(&device, &commits, nr_cuts, seed);
    println!("options {options}: {} events, {flushes} flushes, {counts:?}", device.events());
    assert!(counts["files"] > 0 && counts["databases"] > 0 && counts["repositories"] > 0, "nothing was promised");
}

#[test]
fn promises_of_a_mount_survive_power_cuts_through_dev_fuse() {
    cuts("noio_uring,commit=5");
}

#[test]
fn promises_of_a_mount_survive_power_cuts_through_rings() {
    if let Some(_rings) = capability::fuse_rings() {
        cuts("compress=zstd,commit=2");
    }
}
