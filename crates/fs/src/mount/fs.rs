//! [`Fs`]: one open filesystem; opening, syncing and closing it.
//!
//! - I1. When [`Fs::sync`] or [`Fs::close`] succeeds, every earlier change is on disk.
//! - I2. When [`Fs::close`] returns, nothing is written any more. Only the first call closes; every other call waits for
//!   it and has the same result.

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use ubtrfs_device::Device;
use ubtrfs_format::clock::fixed_clock;
use ubtrfs_format::item::DevStatsItem;
use ubtrfs_format::superblock::{CompatRo, Superblock};
use ubtrfs_format::{DevId, Generation};
use ubtrfs_transaction::{
    BackgroundWork, DeviceSummary, Engine, EngineOptions, FilesystemGeometry, Flusher, usable_devices,
};

use crate::balance::reclaim::ReclaimThread;
use crate::balance::state::BalanceState;
use crate::devices::jobs::DeviceJobs;
use crate::devices::replace::Replaces;
use crate::devices::scrub::RunningScrub;
use crate::error::{Error, Result};
use crate::inode::cache::InodeCache;
use crate::inode::entered::EnteredSubvolumes;
use crate::inode::readahead::Readahead;
use crate::mount::commit_thread::CommitThread;
use crate::mount::memory_budget::MemoryBudget;
use crate::mount::resync_thread::ResyncThread;
use crate::mount::stream_memory::StreamMemory;
use crate::namei::state::NameiState;
use crate::options::{MountOptions, NewDataOptions};
use crate::service_threads::ServiceThreads;
use crate::session::context::Context;
use crate::subvolume::state::Subvolumes;
use crate::types::InodeId;
use crate::writeback::data_path::DataPath;

/// An open filesystem.
#[derive(Debug)]
pub struct Fs {
    pub(crate) context: Context,
    pub(crate) engine: Arc<Engine>,
    /// The options that the filesystem was opened with. `data_options` has some of them as they are now.
    pub(crate) options: MountOptions,
    /// How new data is written, as it is now.
    pub(crate) data_options: RwLock<NewDataOptions>,
    pub(crate) geometry: FilesystemGeometry,
    pub(crate) inodes: InodeCache,
    pub(crate) entered: EnteredSubvolumes,
    pub(crate) names: NameiState,
    pub(crate) subvolumes: Subvolumes,
    pub(crate) data: DataPath,
    pub(crate) readahead: Readahead,
    pub(crate) balance: BalanceState,
    pub(crate) reclaim: ReclaimThread,
    pub(crate) resizes: DeviceJobs<()>,
    pub(crate) removals: DeviceJobs<()>,
    pub(crate) replaces: Replaces,
    pub(crate) scrubs: DeviceJobs<RunningScrub>,
    pub(crate) resync: ResyncThread,
    devices_at_open: (Generation, Vec<DeviceSummary>),
    left_out: Vec<String>,
    leaf_threads: ServiceThreads,
    pub(crate) commit_thread: CommitThread,
    /// The memory of sends, and of each of two parts of receives ([`crate::mount::memory_budget`]).
    pub(crate) streams: StreamMemory,
    /// The result of closing; `None` before closing. Locked while the filesystem is being closed (I2).
    closed: Mutex<Option<CloseOutcome>>,
}

/// The result of closing.
type CloseOutcome = std::result::Result<(), CloseError>;

/// The failure of a close, for the calls that follow.
#[derive(Clone, Debug)]
struct CloseError {
    errno: i32,
    reason: String,
}

impl From<&Error> for CloseError {
    fn from(error: &Error) -> Self {
        Self { errno: error.errno(), reason: error.to_string() }
    }
}

impl Fs {
    /// Opens the filesystem on these devices: replays the tree log, finds the subvolume to show, deletes inodes that
    /// earlier sessions left unlinked in that subvolume, and starts the background threads. With the option `degraded`, a
    /// device that was only found ([`Device::is_found`]) is left out if it cannot be used.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Arc<Self>> {
        let refused =
            |option: &str, problem: &str| Error::MountOption { option: option.to_owned(), problem: problem.to_owned() };
        if options.rescue.needs_read_only() && !options.read_only {
            return Err(refused("rescue", "needs ro, because a filesystem whose damage is ignored is not written"));
        }
        if options.nologreplay && !options.read_only {
            return Err(refused("nologreplay", "needs ro, because a commit would end the log"));
        }
        let (devices, mut left_out) = match options.degraded {
            true => usable_devices(devices),
            false => (devices, Vec::new()),
        };
        let budget = MemoryBudget::of(options.memory_bytes);
        let engine = Engine::open(
            devices,
            EngineOptions {
                degraded: options.degraded,
                read_only: options.read_only,
                memory_bytes: budget.engine_bytes,
                discard: options.discard,
                discard_later: options.discard_async,
                replay_log: !options.nologreplay,
                rescue: options.rescue,
            },
        )?;
        if options.no_free_space_tree && engine.superblock().compat_ro().contains(CompatRo::FREE_SPACE_TREE) {
            return Err(refused(
                "space_cache",
                "cannot be v1 or off, because the filesystem has a free space tree; omit it, or give space_cache=v2",
            ));
        }
        left_out.extend(engine.devices_not_used());
        for reason in &left_out {
            tracing::warn!("{reason}");
        }
        let devices_at_open = (engine.superblock().generation, engine.devices());
        crate::mount::log_replay::replay(&engine)?;
        let root = crate::subvolume::list::find_root(&engine, &options)?;
        let geometry = engine.geometry();
        let inodes =
            InodeCache::new(usize::try_from(budget.inode_bytes / INODE_BYTES).unwrap_or(usize::MAX), budget.name_bytes);
        let context = Context::new(Arc::clone(&engine), options.read_only, InodeId::root_of(root));
        let replaces = Replaces::default();
        let fs = Arc::new(Self {
            data: DataPath::new(budget.dirty_bytes),
            readahead: Readahead::new(budget.read_bytes),
            balance: BalanceState::new(replaces.exclusive()),
            reclaim: ReclaimThread::new(options.bg_reclaim_threshold),
            resizes: DeviceJobs::default(),
            removals: DeviceJobs::default(),
            replaces,
            scrubs: DeviceJobs::default(),
            resync: ResyncThread::default(),
            devices_at_open,
            left_out,
            leaf_threads: ServiceThreads::default(),
            inodes,
            names: NameiState::new(),
            entered: EnteredSubvolumes::new(budget.subvolume_bytes, budget.bare_bytes, Self::delete_orphans),
            subvolumes: Subvolumes::default(),
            commit_thread: CommitThread::new(Arc::clone(&context.commits), options.commit_secs),
            streams: StreamMemory::new(budget.stream_bytes),
            closed: Mutex::default(),
            context,
            geometry,
            data_options: RwLock::new(options.data_options()),
            options,
            engine,
        });
        let flusher: std::sync::Weak<dyn Flusher> = Arc::downgrade(&(Arc::clone(&fs) as Arc<dyn Flusher>));
        fs.engine.set_flusher(flusher);
        if !fs.inode(fs.root())?.read()?.is_dir() {
            return Err(Error::NotDirectory);
        }
        fs.readahead.start(&fs);
        let leaves = fs.engine.leaf_read_ahead();
        leaves.accept();
        fs.leaf_threads.start("ubtrfs-leaves", 1, move || leaves.run());
        if let Err(error) = fs.find_balance() {
            tracing::warn!("finding an interrupted balance failed: {error}");
        }
        if fs.read_only().is_none() {
            // A failed search for deleted subvolumes does not fail the mount.
            if let Err(error) = fs.engine.find_dead_roots() {
                tracing::warn!("finding deleted subvolumes failed: {error}");
            }
            fs.resync.start(&fs)?;
            fs.replaces.start(&fs);
            // Nothing depends on these threads. They would do their work at another moment each time.
            if fixed_clock().is_none() {
                fs.commit_thread.start(&fs);
                fs.data.threads.start(&fs);
                fs.reclaim.start(&fs);
            }
        }
        Ok(fs)
    }

    /// Opens the filesystem that [`Fs::make_sprout`] made on this seed with `device`, with the options of this one, but writable.
    ///
    /// # Errors
    ///
    /// As for [`Fs::open`]; fails if an option of this one needs a read-only filesystem.
    pub fn open_sprout(&self, device: Arc<dyn Device>) -> Result<Arc<Self>> {
        let mut devices = self.engine.given_devices();
        devices.push(device);
        Self::open(devices, MountOptions { read_only: false, ..self.options_now() })
    }

    /// Takes over the references of the kernel to the inodes of the seed on which this filesystem was made. During the
    /// call, no reference to an inode of either filesystem may be added or given back.
    pub fn take_references(&self, seed: &Self) {
        self.inodes.take_users(&seed.inodes);
    }

    /// The reason why the filesystem is read-only, or `None` if it is writable.
    pub fn read_only(&self) -> Option<String> {
        self.context.read_only()
    }

    /// The options that the filesystem was opened with.
    pub fn options(&self) -> &MountOptions {
        &self.options
    }

    /// Changes options, as a remount of Linux does. New data is written as they say. [`Self::options`] stays as it is.
    ///
    /// # Errors
    ///
    /// An option is wrong, or can only be given when a filesystem is opened ([`MountOptions::can_change`]). Then nothing has
    /// changed.
    pub fn change_options(&self, changes: &[String]) -> Result<()> {
        let mut now = self.options_now();
        for option in changes {
            if !MountOptions::can_change(option) || !now.apply(option)? {
                let problem = "cannot change while the filesystem is open".to_owned();
                return Err(Error::MountOption { option: option.clone(), problem });
            }
        }
        self.commit_thread.set_interval(now.commit_secs);
        *self.data_options.write() = now.data_options();
        Ok(())
    }

    /// The options that [`Self::change_options`] can change, as they are now.
    pub fn changeable_options(&self) -> Vec<String> {
        self.options_now().changeable()
    }

    /// The options as they are now.
    fn options_now(&self) -> MountOptions {
        let NewDataOptions { compress, nodatacow, nodatasum } = *self.data_options.read();
        let commit_secs = self.commit_thread.interval_secs();
        MountOptions { compress, nodatacow, nodatasum, commit_secs, ..self.options.clone() }
    }

    /// The superblock of the last commit.
    pub fn superblock(&self) -> Superblock {
        self.engine.superblock()
    }

    /// The root directory of the subvolume that `subvol=` or `subvolid=` selects; without these options, that of the
    /// default subvolume.
    pub fn root(&self) -> InodeId {
        self.context.root()
    }

    /// Lets `..` of the selected subvolume lead to the directory above, for a mount whose root is the top level and that
    /// shows the subvolume as one of several.
    pub fn show_top_level(&self) {
        self.context.show_top_level();
    }

    /// Whether the whole filesystem can be reached through names: its top level is the selected subvolume, or
    /// [`Self::show_top_level`] was called.
    pub fn shows_top_level(&self) -> bool {
        self.context.shows_top_level()
    }

    /// The root directory of the subvolume that the options `subvol` and `subvolid` select; without them, that of the
    /// default subvolume.
    ///
    /// # Errors
    /// There is no such subvolume, or the options contradict each other.
    pub fn selected_root(&self, options: &MountOptions) -> Result<InodeId> {
        crate::subvolume::list::find_root(&self.engine, options).map(InodeId::root_of)
    }

    /// The newest generation when the filesystem was opened, and the devices as they were then, missing ones included.
    pub fn devices_at_open(&self) -> &(Generation, Vec<DeviceSummary>) {
        &self.devices_at_open
    }

    /// The given devices that are left out, each with the reason: they were removed from the filesystem, or they were only
    /// found and cannot be used, so that the option `degraded` leaves them out.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// The devices of the filesystem and of its seeds, those that joined it later included.
    pub fn given_devices(&self) -> Vec<Arc<dyn Device>> {
        self.engine.given_devices()
    }

    /// Error counters of the devices, which also count errors of earlier mounts, in this order: write, read, flush,
    /// corruption, generation.
    pub fn device_stats(&self) -> Vec<(DevId, DevStatsItem)> {
        self.engine.device_stats()
    }

    /// Sets the error counters of all devices, or of one, to 0, durable on return. Returns the counters before.
    pub fn reset_device_stats(&self, of: Option<DevId>) -> Result<Vec<(DevId, DevStatsItem)>> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.reset_device_stats(of)?)
    }

    /// Writes out all data and commits (I1); does nothing on a read-only mount. Fails if some data cannot be written;
    /// everything else is on disk then. Fails with [`Error::Closed`] after [`Fs::close`].
    pub fn sync(&self) -> Result<()> {
        if self.read_only().is_some() && self.options.read_only {
            return Ok(());
        }
        // Closing waits for this sync, which would otherwise write after the filesystem is closed (I2).
        let _changing = self.context.begin_change()?;
        self.delete_undeleted();
        let flushed = self.flush_all_data();
        // Commit even if some data could not be written.
        self.engine.commit()?;
        self.evict_committed_subvolumes();
        flushed
    }

    /// Requests a commit in the background, without writing dirty data. This is for callers that make very many changes
    /// and want a short final commit.
    pub fn start_commit(&self) {
        self.context.commits.request_work(BackgroundWork::Commit);
    }

    /// Waits for running changes, writes out all data, commits and stops the background threads (I1). Later changes
    /// fail with [`Error::Closed`].
    ///
    /// # Errors
    ///
    /// Fails if some data was not written, or if the filesystem became read-only while it was open. Later calls fail
    /// with [`Error::CloseFailed`] then (I2).
    pub fn close(&self) -> Result<()> {
        let mut closed = self.closed.lock();
        if let Some(outcome) = &*closed {
            return outcome.clone().map_err(|CloseError { errno, reason }| Error::CloseFailed { errno, reason });
        }
        // This outcome stays if closing panics.
        let panicked = Error::from(ubtrfs_error::Error::Bug { what: "closing the filesystem panicked".to_owned() });
        *closed = Some(Err(CloseError::from(&panicked)));
        let done = self.close_once();
        *closed = Some(done.as_ref().map_err(CloseError::from).copied());
        done
    }

    /// Whether this filesystem uses a device: [`Fs::close`] has not ended yet, and the object is one of the filesystem's
    /// devices, or the new device of a running replacement.
    pub fn uses_device(&self, device: &dyn Device) -> bool {
        let is_open = self.closed.try_lock().is_none_or(|closed| closed.is_none());
        is_open && self.engine.uses_device(device)
    }

    fn close_once(&self) -> Result<()> {
        self.context.end_changes();
        self.balance.close();
        self.suspend_replace();
        self.resync.stop();
        self.reclaim.stop();
        self.commit_thread.stop();
        self.data.threads.stop();
        self.readahead.stop();
        self.engine.leaf_read_ahead().stop();
        self.leaf_threads.join();
        let flushed = match self.read_only() {
            Some(_) => Ok(()),
            None => {
                self.delete_undeleted();
                let deleted = self.delete_unused_orphans();
                self.flush_all_data().and(deleted)
            }
        };
        self.end_all_deletions();
        // Commit even if some data could not be written.
        let closed = self.engine.close();
        flushed?;
        closed?;
        if self.read_only().is_none() {
            self.engine.check_nothing_reserved();
        }
        Ok(())
    }

    /// Whether any change is not on disk yet.
    pub(crate) fn has_changes(&self) -> bool {
        self.data.has_dirty() || self.engine.has_changes() || self.names.has_undeleted()
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.engine.leaf_read_ahead().stop();
        // A panic may have left changes half made, so the disk keeps the last commit.
        if std::thread::panicking() || self.closed.get_mut().is_some() {
            return;
        }
        if let Err(error) = self.close() {
            tracing::error!("closing the filesystem failed: {error}");
        }
    }
}

/// Estimated memory of a cached inode without dirty data.
const INODE_BYTES: u64 = 1024;
