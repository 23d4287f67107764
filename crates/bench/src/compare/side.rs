//! The sides of a comparison, each a fresh filesystem that cleans up after itself.
//!
//! - S1. Dropping a side undoes its setup in reverse order: it unmounts, ends the server, detaches the loop device, and
//!   removes the files. The setup is undone even after an error, a signal, or an incomplete start.
//! - S2. [`CompareSide::drop_caches`] empties all caches: it mounts the filesystem again and drops the machine's
//!   caches. The null server is not mounted again, because it keeps all names in memory only.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};

use crate::machine;
use crate::target::engine::{MkfsLayout, make_images};

/// A side of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SideKind {
    /// The engine in the client's process
    Engine,
    /// The engine mounted by `ubtrfs mount`
    Mount,
    /// Linux's btrfs on a loop device
    Linux,
    /// A FUSE server that does nothing
    Null,
    /// The engine in the client's process, on images that qemu-nbd serves through Unix sockets
    Nbd,
}

impl SideKind {
    /// The sides of a comparison without `--sides`.
    pub(crate) const ALL: [Self; 4] = [Self::Engine, Self::Mount, Self::Linux, Self::Null];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Mount => "mount",
            Self::Linux => "linux",
            Self::Null => "null",
            Self::Nbd => "nbd",
        }
    }

    /// Whether the engine runs in the client's process.
    fn is_in_process(self) -> bool {
        matches!(self, Self::Engine | Self::Nbd)
    }

    /// Whether requests go through a FUSE server.
    pub(crate) fn is_fuse(self) -> bool {
        matches!(self, Self::Mount | Self::Null)
    }
}

/// The options for making sides.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Directory for images and mount points.
    pub(crate) scratch: PathBuf,
    /// Number of devices of each filesystem.
    pub(crate) nr_devices: usize,
    pub(crate) layout: MkfsLayout,
    /// Whether the loop device bypasses the page cache of the image.
    pub(crate) loop_direct_io: bool,
    /// `-o` options of `ubtrfs mount`; the options in [`NULL_SERVER_FLAGS`] and `threads=` apply to the null server
    /// too.
    pub(crate) mount_options: String,
    /// The memory budget of the engine (`--memory`).
    pub(crate) memory_bytes: Option<u64>,
    /// The arguments of `bench exec` with which servers are started.
    pub(crate) exec_args: Vec<OsString>,
}

/// One fresh filesystem.
#[derive(Debug)]
pub(crate) struct CompareSide {
    kind: SideKind,
    setup: Setup,
    /// An image for each device.
    images: Vec<PathBuf>,
    /// Whether the last device is left out.
    degraded: bool,
    dir: PathBuf,
    loop_devices: Vec<String>,
    server: Option<Child>,
    /// A server of NBD for each image.
    exports: Vec<Child>,
    mounted: bool,
}

const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(5);

impl CompareSide {
    /// Makes and mounts a side.
    pub(crate) fn new(kind: SideKind, setup: &Setup) -> Result<Self> {
        let image = |number| setup.scratch.join(format!("{}-{number}.img", kind.name()));
        let mut side = Self {
            kind,
            setup: setup.clone(),
            images: (1..=setup.nr_devices).map(image).collect(),
            degraded: false,
            dir: setup.scratch.join(format!("{}.mnt", kind.name())),
            loop_devices: Vec::new(),
            server: None,
            exports: Vec::new(),
            mounted: false,
        };
        std::fs::create_dir_all(&side.dir).with_context(|| format!("cannot make {}", side.dir.display()))?;
        match kind {
            SideKind::Engine | SideKind::Mount | SideKind::Nbd => make_images(&side.images, &setup.layout)?,
            SideKind::Linux => {
                for image in &side.images {
                    File::create_new(image)
                        .and_then(|file| file.set_len(setup.layout.image_bytes))
                        .with_context(|| format!("cannot make {}", image.display()))?;
                }
                let mut mkfs = Command::new(machine::program("mkfs.btrfs")?);
                mkfs.args(setup.layout.nodesize.map(|bytes| format!("--nodesize={bytes}")));
                mkfs.args(setup.layout.data.iter().map(|profile| format!("--data={profile}")));
                mkfs.args(setup.layout.metadata.iter().map(|profile| format!("--metadata={profile}")));
                output(mkfs.arg("-q").args(&side.images))?;
            }
            SideKind::Null => {}
        }
        side.mount()?;
        Ok(side)
    }

    /// Returns the arguments of `bench run` that select this side.
    pub(crate) fn target_args(&self) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        if self.kind.is_in_process() {
            for image in self.given() {
                let name = match self.kind {
                    SideKind::Nbd => format!("nbd+unix:///?socket={}", socket_of(image).display()).into(),
                    _ => image.into(),
                };
                args.extend(["--engine".into(), name]);
            }
            args.extend(self.degraded.then(|| "--degraded".into()));
            if let Some(bytes) = self.setup.memory_bytes {
                args.push(format!("--memory={bytes}").into());
            }
        } else {
            args.extend(["--dir".into(), self.dir.clone().into()]);
        }
        if let Some(server) = &self.server {
            args.push(format!("--server-pid={}", server.id()).into());
        }
        args
    }

    /// The images of the devices that are used.
    fn given(&self) -> &[PathBuf] {
        &self.images[..self.images.len() - usize::from(self.degraded)]
    }

    /// Empties the caches (S2). With `warm`, the machine's caches are kept. If `degraded` is set, the last device is left
    /// out from then on.
    pub(crate) fn drop_caches(&mut self, warm: bool, degraded: bool) -> Result<()> {
        let can_mount_again = self.kind != SideKind::Null;
        if can_mount_again {
            self.unmount()?;
        }
        if degraded && !self.degraded && self.kind != SideKind::Null {
            self.degraded = true;
            self.detach_loop_devices()?;
            // A device that is beside the others would be found.
            if let Some(last) = self.images.last() {
                std::fs::rename(last, last.with_extension("left-out"))?;
            }
        }
        if !warm {
            machine::drop_caches()?;
        }
        if can_mount_again { self.mount() } else { Ok(()) }
    }

    /// The number of requests that the server of this side has answered so far, by operation. Empty without a server.
    pub(crate) fn requests(&self) -> Result<BTreeMap<String, f64>> {
        let text = match self.kind {
            SideKind::Mount => {
                output(Command::new(machine::beside("ubtrfs")?).args(["stats", "--prometheus"]).arg(&self.dir))?
            }
            SideKind::Null => {
                let socket = self.counts_socket();
                let read = UnixStream::connect(&socket).and_then(std::io::read_to_string);
                read.with_context(|| format!("cannot read {}", socket.display()))?
            }
            SideKind::Engine | SideKind::Linux | SideKind::Nbd => return Ok(BTreeMap::new()),
        };
        Ok(text.lines().filter_map(parse_requests).collect())
    }

    /// The socket at which the null server returns its counts.
    fn counts_socket(&self) -> PathBuf {
        self.setup.scratch.join(format!("{}.counts", self.kind.name()))
    }

    /// Unmounts, and runs btrfs check.
    pub(crate) fn check(&mut self) -> Result<()> {
        if self.kind == SideKind::Null {
            return Ok(());
        }
        self.unmount()?;
        // btrfs check finds the other devices of an array among the loop devices.
        self.attach_loop_devices()?;
        let mut command = Command::new(machine::program("btrfs")?);
        command.args(["check", "--readonly"]).args(self.loop_devices.first());
        let checked = output(&mut command).map(drop);
        self.detach_loop_devices()?;
        checked.with_context(|| format!("btrfs check of the {} side", self.kind.name()))
    }

    fn mount(&mut self) -> Result<()> {
        match self.kind {
            SideKind::Engine => Ok(()),
            SideKind::Nbd => self.start_exports(),
            SideKind::Mount => {
                let mut command = self.server_command();
                command.arg(machine::beside("ubtrfs")?).args(["mount", "-f"]);
                if !self.setup.mount_options.is_empty() {
                    command.arg("-o").arg(&self.setup.mount_options);
                }
                command.args(self.degraded.then_some("-odegraded"));
                if let Some(bytes) = self.setup.memory_bytes {
                    command.arg(format!("--memory={bytes}"));
                }
                command.args(self.given()).arg(&self.dir);
                self.start(command)
            }
            SideKind::Null => {
                let mut command = self.server_command();
                command.arg(std::env::current_exe()?).arg("null-server");
                command.arg("--counts").arg(self.counts_socket());
                for option in self.setup.mount_options.split(',') {
                    if let Some(threads) = option.strip_prefix("threads=") {
                        command.arg(format!("--threads={threads}"));
                    }
                    if let Some((_, flag)) = NULL_SERVER_FLAGS.iter().find(|(name, _)| *name == option) {
                        command.arg(flag);
                    }
                }
                command.arg(&self.dir);
                self.start(command)
            }
            SideKind::Linux => self.mount_linux(),
        }
    }

    fn attach_loop_devices(&mut self) -> Result<()> {
        for number in self.loop_devices.len()..self.given().len() {
            let mut losetup = Command::new(machine::program("losetup")?);
            losetup.args(["--find", "--show"]);
            if self.setup.loop_direct_io {
                losetup.arg("--direct-io=on");
            }
            let device = output(losetup.arg(&self.images[number]))
                .context("cannot get a loop device; load the module with: modprobe loop")?;
            self.loop_devices.push(device.trim().to_owned());
        }
        Ok(())
    }

    fn mount_linux(&mut self) -> Result<()> {
        self.attach_loop_devices()?;
        let (first, others) = self.loop_devices.split_first().context("no loop device")?;
        let mut mount = Command::new(machine::program("mount")?);
        mount.args(["-t", "btrfs"]).args(self.degraded.then_some("-odegraded"));
        mount.args(others.iter().map(|device| format!("-odevice={device}")));
        output(mount.arg(first).arg(&self.dir))
            .context("Linux did not mount its btrfs; load the module with: modprobe btrfs")?;
        self.mounted = true;
        Ok(())
    }

    /// Serves the images by NBD. The servers bypass the page cache, as the engine does for large reads and writes.
    fn start_exports(&mut self) -> Result<()> {
        for image in self.given().to_vec() {
            let socket = socket_of(&image);
            let mut command = self.server_command();
            command.arg(machine::program("qemu-nbd")?);
            command.args(["-f", "raw", "-t", "-e", "0", "--cache=none", "--aio=native", "--discard=unmap", "-k"]);
            command.arg(&socket).arg(&image).stdin(Stdio::null());
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            self.exports.push(command.spawn().context("cannot start qemu-nbd")?);
            let started = Instant::now();
            while !socket.exists() {
                if started.elapsed() > START {
                    bail!("qemu-nbd does not listen at {}", socket.display());
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }

    /// Ends the servers of NBD. The clients have ended, so all is flushed.
    fn end_exports(&mut self) {
        for mut export in self.exports.drain(..) {
            let _ = export.kill();
            let _ = export.wait();
        }
        for image in &self.images {
            let _ = std::fs::remove_file(socket_of(image));
        }
    }

    /// Makes the command `bench exec ... --`, to which the server's command line is appended.
    fn server_command(&self) -> Command {
        let own = std::env::current_exe().unwrap_or_else(|_| "bench".into());
        let mut command = Command::new(own);
        command.arg("exec").args(&self.setup.exec_args).arg("--");
        command
    }

    /// Starts a server and waits until it has mounted.
    fn start(&mut self, mut command: Command) -> Result<()> {
        let log_path = self.setup.scratch.join(format!("{}.log", self.kind.name()));
        let log = File::create(&log_path)?;
        let before = device_of(&self.dir)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Use another process group, because Ctrl-C must reach only this process: this process then unmounts the sides
        // one by one.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let server = command.spawn().context("cannot start a server")?;
        let server = self.server.insert(server);
        let started = Instant::now();
        loop {
            if let Some(status) = server.try_wait()? {
                let said = std::fs::read_to_string(&log_path).unwrap_or_default();
                bail!("the {} server ended before it was mounted ({status}): {}", self.kind.name(), said.trim());
            }
            if device_of(&self.dir)? != before {
                break;
            }
            if started.elapsed() > START {
                bail!("the {} server did not mount in {} s", self.kind.name(), START.as_secs());
            }
            std::thread::sleep(POLL);
        }
        self.mounted = true;
        Ok(())
    }

    /// Unmounts and waits until the last commit is durable.
    fn unmount(&mut self) -> Result<()> {
        self.end_exports();
        if std::mem::take(&mut self.mounted) {
            if self.kind == SideKind::Mount {
                ubtrfs_fuse::unmount(&self.dir, false)?;
            } else {
                // Retry, because a process that has just ended may still use the mount.
                let mut result = Ok(());
                for _ in 0..100 {
                    result = rustix::mount::unmount(&self.dir, UnmountFlags::NOFOLLOW);
                    if result != Err(rustix::io::Errno::BUSY) {
                        break;
                    }
                    std::thread::sleep(POLL);
                }
                result.with_context(|| format!("cannot unmount {}", self.dir.display()))?;
            }
        }
        self.end_server()
    }

    fn detach_loop_devices(&mut self) -> Result<()> {
        let devices = std::mem::take(&mut self.loop_devices);
        for device in &devices {
            output(Command::new(machine::program("losetup")?).args(["-d", device]))?;
        }
        if devices.len() > 1 {
            // Linux remembers the devices of arrays.
            let _ = output(Command::new(machine::program("btrfs")?).args(["device", "scan", "--forget"]));
        }
        Ok(())
    }

    fn end_server(&mut self) -> Result<()> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let started = Instant::now();
        while server.try_wait()?.is_none() {
            if started.elapsed() > STOP {
                let _ = server.kill();
                let _ = server.wait();
                bail!("the {} server did not end in {} s and was killed", self.kind.name(), STOP.as_secs());
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for CompareSide {
    fn drop(&mut self) {
        let mut failures = Vec::new();
        if let Err(error) = self.unmount() {
            failures.push(format!("{error:#}"));
            let _ = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH);
            if let Some(server) = &self.server
                && let Some(pid) = i32::try_from(server.id()).ok().and_then(Pid::from_raw)
            {
                let _ = rustix::process::kill_process(pid, Signal::TERM);
            }
            let _ = self.end_server();
        }
        if let Err(error) = self.detach_loop_devices() {
            failures.push(format!("{error:#}"));
        }
        for image in &self.images {
            let _ = std::fs::remove_file(image);
            let _ = std::fs::remove_file(image.with_extension("left-out"));
        }
        let _ = std::fs::remove_file(self.counts_socket());
        let _ = std::fs::remove_dir(&self.dir);
        let _ = std::fs::remove_file(self.setup.scratch.join(format!("{}.log", self.kind.name())));
        for failure in failures {
            eprintln!("bench: cleaning up: {failure}");
        }
    }
}

/// The socket at which an image is served.
fn socket_of(image: &Path) -> PathBuf {
    image.with_extension("socket")
}

/// Parses a line of Prometheus text: returns a FUSE operation and the number of its requests.
fn parse_requests(line: &str) -> Option<(String, f64)> {
    let rest = line.strip_prefix("ubtrfs_fuse_requests_total{opcode=\"")?;
    let (opcode, count) = rest.split_once("\"} ")?;
    Some((opcode.to_owned(), count.parse().ok()?))
}

fn device_of(dir: &Path) -> Result<u64> {
    Ok(rustix::fs::stat(dir).with_context(|| format!("cannot stat {}", dir.display()))?.st_dev)
}

/// Runs a program to its end and returns its standard output.
fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_owned();
    let output = command
        .stdin(Stdio::null())
        .env("LC_ALL", "C")
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed ({}): {}", program.display(), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Options of `ubtrfs mount`, and the corresponding arguments of the null server.
const NULL_SERVER_FLAGS: [(&str, &str); 6] = [
    ("noio_uring", "--no-io-uring"),
    ("writeback_cache", "--writeback-cache"),
    ("idle_poll", "--idle-poll"),
    ("noopen", "--no-open"),
    ("noxattr", "--no-xattrs"),
    ("noallow_other", "--no-allow-other"),
];
