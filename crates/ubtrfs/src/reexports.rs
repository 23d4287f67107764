//! Types of other crates that are part of the library's interface, each with an example.

#[cfg(feature = "import")]
pub use archives::{
    CopyOptions, CopyReport, ExportOptions, ExportReport, IdRange, ImportOptions, ImportReport, OwnerMap,
};
/// ```
/// use ubtrfs::{CheckLimits, CheckOptions};
///
/// let options = CheckOptions { limits: CheckLimits { per_code: 5 }, ..CheckOptions::default() };
/// assert!(!options.data_csums);
/// ```
#[doc(inline)]
pub use ubtrfs_check::CheckLimits;
/// ```
/// use std::sync::Arc;
/// use ubtrfs::{CheckOptions, CheckStats, Device, Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> ubtrfs::Result<()> {
/// let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(128 << 20));
/// Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;
/// let CheckStats { tree_blocks, data_extents, .. } =
///     ubtrfs::check(vec![device], CheckOptions::default(), &mut |_problem| {})?.stats;
/// assert!(tree_blocks > 0 && data_extents == 0);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_check::CheckStats;
/// ```
/// use ubtrfs::Code;
///
/// assert_eq!(Code::BlockCsum.to_string(), "E-BLOCK-CSUM");
/// assert!(Code::BlockCsum.is_error() && !Code::Uuid.is_error());
/// for code in Code::ALL {
///     println!("{}: {}", code.as_str(), code.meaning());
/// }
/// ```
#[doc(inline)]
pub use ubtrfs_check::Code;
/// ```
/// // Also compare all data with its checksums.
/// let options = ubtrfs::CheckOptions { data_csums: true, ..Default::default() };
/// ```
#[doc(inline)]
pub use ubtrfs_check::Options as CheckOptions;
/// ```
/// use ubtrfs::Place;
/// use ubtrfs::format::RootId;
///
/// let place = Place::item(RootId::FS_TREE, 30_408_704, 7);
/// assert_eq!((place.bytenr, place.slot), (Some(30_408_704), Some(7)));
/// assert_eq!(Place::tree(RootId::FS_TREE).bytenr, None);
/// assert_eq!(Place::block(RootId::FS_TREE, 30_408_704).slot, None);
/// assert_eq!(Place::at(30_408_704).tree, None);
/// ```
#[doc(inline)]
pub use ubtrfs_check::Place;
/// ```
/// use ubtrfs::{Code, Place, Problem};
///
/// let problem = Problem { code: Code::BlockCsum, place: Place::at(4096), text: "wrong checksum".to_owned() };
/// assert_eq!(problem.to_string(), "E-BLOCK-CSUM: bytenr 4096: wrong checksum");
/// ```
#[doc(inline)]
pub use ubtrfs_check::Problem;
/// ```
/// use std::sync::Arc;
/// use ubtrfs::{CheckOptions, Code, Device, Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(128 << 20));
/// Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;
/// // Overwrite the second copy of the superblock.
/// device.write_at(64 << 20, &[0xff; 4096])?;
/// let report = ubtrfs::check(vec![device], CheckOptions::default(), &mut |_problem| {})?;
/// assert!(report.complete && !report.is_clean());
/// assert_eq!(report.counts[&Code::SuperMirror], 1);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_check::Report;
/// ```
/// use ubtrfs::{Access, FileDevice};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let scratch = tempfile::tempdir()?;
/// # let image = scratch.path().join("disk.img");
/// # ubtrfs::Filesystem::make_image(&image, 128 << 20)?.close()?;
/// // Several readers can share an image; a writer excludes all others.
/// let reader = FileDevice::open(&image, Access::ReadOnly)?;
/// let other = FileDevice::open(&image, Access::ReadOnly)?;
/// assert!(FileDevice::open(&image, Access::ReadWrite).is_err());
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_device::Access;
/// ```
/// use ubtrfs::{Device, MemoryDevice};
///
/// # fn main() -> std::io::Result<()> {
/// let device: Box<dyn Device> = Box::new(MemoryDevice::new(1 << 20));
/// device.write_at(4096, b"text")?;
/// device.flush()?;
/// let mut read = [0; 4];
/// device.read_at(4096, &mut read)?;
/// assert_eq!(&read, b"text");
/// // The device has a fixed size.
/// assert!(device.write_at((1 << 20) - 1, b"text").is_err());
/// # Ok(()) }
/// ```
///
/// The example `own_device` implements a device.
#[doc(inline)]
pub use ubtrfs_device::Device;
/// ```
/// use std::sync::Arc;
/// use ubtrfs::{Device, FileDevice, Filesystem, MkfsOptions, MountOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let scratch = tempfile::tempdir()?;
/// # let image = scratch.path().join("disk.img");
/// // A new sparse image file of 128 MiB.
/// let device: Arc<dyn Device> = Arc::new(FileDevice::create(&image, 128 << 20, true)?);
/// Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;
/// Filesystem::open_devices(vec![device], MountOptions::default())?.close()?;
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_device::FileDevice;
/// ```
/// use ubtrfs::{Device, MemoryDevice};
///
/// # fn main() -> std::io::Result<()> {
/// let device = MemoryDevice::new(1 << 40);
/// device.write_at(1 << 39, b"text")?;
/// // Only ranges that were written occupy memory.
/// assert!(device.resident_bytes() < 1 << 20);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_device::MemoryDevice;
/// ```
/// use std::path::Path;
/// use ubtrfs::{Access, FileDevice, OpenError};
///
/// let error = FileDevice::open(Path::new("missing.img"), Access::ReadOnly).unwrap_err();
/// assert!(matches!(error, OpenError::Missing { .. }));
/// ```
#[doc(inline)]
pub use ubtrfs_device::OpenError;
/// ```
/// use ubtrfs::{EngineError, FsError};
///
/// assert_eq!(FsError::from(EngineError::NoSpace).to_string(), "no space left");
/// ```
#[doc(inline)]
pub use ubtrfs_error::Error as EngineError;
/// ```
/// use ubtrfs::{CsumType, MkfsOptions};
///
/// let options = MkfsOptions { csum_type: CsumType::Blake2, ..MkfsOptions::default() };
/// assert_ne!(options.csum_type, CsumType::default());
/// ```
#[doc(inline)]
pub use ubtrfs_format::CsumType;
/// ```
/// use ubtrfs::{AtimeMode, MountOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// assert_eq!(MountOptions::parse("noatime")?.atime, AtimeMode::Noatime);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::AtimeMode;
/// ```
/// use ubtrfs::Caller;
///
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// let alice = Caller { uid: 1000, gid: 1000, umask: 0o022 };
/// assert!(!alice.is_privileged() && Caller::ROOT.is_privileged());
/// fs.with_caller(alice).create_dir("/home")?;
/// assert_eq!(fs.metadata("/home")?.permissions(), 0o755);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::Caller;
/// ```
/// use ubtrfs::format::Compression;
/// use ubtrfs::{CompressSpec, MountOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let level_3 = CompressSpec::new(Compression::Zstd);
/// assert_eq!(MountOptions::parse("compress=zstd:3")?.compress, Some(level_3));
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::CompressSpec;
/// ```
/// use ubtrfs::{FsError, MountOptions};
///
/// let error = MountOptions::parse("compress=fast").unwrap_err();
/// assert!(matches!(error, FsError::MountOption { .. }));
/// // EINVAL.
/// assert_eq!(error.errno(), 22);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::Error as FsError;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// use ubtrfs::FileExtentInfo;
///
/// fs.write("/f", vec![1; 1 << 20])?;
/// fs.sync()?;
/// let FileExtentInfo { offset, len_bytes, .. } = fs.open("/f")?.extents()?[0];
/// assert_eq!((offset, len_bytes), (0, 1 << 20));
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::FileExtentInfo;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// use ubtrfs::FileExtentKind;
///
/// fs.write("/small", "text")?;
/// fs.sync()?;
/// assert_eq!(fs.open("/small")?.extents()?[0].kind, FileExtentKind::Inline);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::FileExtentKind;
/// ```
/// use ubtrfs::{Caller, FlagRights};
///
/// assert_eq!(Caller::ROOT.flag_rights(), FlagRights { as_owner: true, immutable: true });
/// ```
#[doc(inline)]
pub use ubtrfs_fs::FlagRights;
/// ```
/// use ubtrfs::Job;
///
/// // Another thread reads the progress, and can cancel the work.
/// let job = Job::new();
/// assert_eq!(job.progress().done, 0);
/// job.cancel();
/// assert!(job.progress().is_cancelled);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::Job;
/// ```
/// use std::time::Duration;
/// use ubtrfs::{Job, JobProgress};
///
/// let job = Job::new();
/// let JobProgress { done, total, .. } = job.wait_for_change(Duration::from_millis(1));
/// assert_eq!((done, total), (0, 0));
/// ```
#[doc(inline)]
pub use ubtrfs_fs::JobProgress;
/// ```
/// use ubtrfs::MountOptions;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut options = MountOptions::parse("ro,subvol=/home")?;
/// assert!(options.read_only && options.apply("noatime")?);
/// // Options that no btrfs has are left to the caller.
/// let (_, unknown) = MountOptions::parse_known("ro,nofail")?;
/// assert_eq!(unknown, ["nofail"]);
/// // 256 MiB for caches and dirty data, and a commit every minute.
/// options.memory_bytes = 256 << 20;
/// options.commit_secs = 60;
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::MountOptions;
/// ```
/// // What was received is read again, and compared with the stream.
/// let options = ubtrfs::ReceiveOptions { verify: true, ..Default::default() };
/// # assert!(!options.keep);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ReceiveOptions;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::{Job, ReceiveOptions, ReceiveReport, SendOptions};
///
/// fs.create_subvolume("/data")?;
/// fs.set_subvolume_read_only("/data", true)?;
/// let mut stream = Vec::new();
/// fs.send("/data", &SendOptions::default(), &mut stream, &Job::new())?;
/// fs.create_dir("/copies")?;
/// let ReceiveReport { subvolumes, nr_bytes, .. } =
///     fs.receive("/copies", &stream[..], &ReceiveOptions::default(), &Job::new())?;
/// // The header of the stream does not count.
/// assert_eq!((subvolumes.len(), nr_bytes + 17), (1, stream.len() as u64));
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ReceiveReport;
/// ```
/// use ubtrfs::ReceivedSubvolume;
///
/// fn names(received: &[ReceivedSubvolume]) -> Vec<String> {
///     received.iter().map(|subvolume| subvolume.path.escape_ascii().to_string()).collect()
/// }
/// # assert!(names(&[]).is_empty());
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ReceivedSubvolume;
/// ```
/// use std::sync::Arc;
/// use ubtrfs::{BlockGroupReport, Device, Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> ubtrfs::Result<()> {
/// let report = Filesystem::make_on(&MemoryDevice::new(128 << 20), &MkfsOptions::default())?;
/// for BlockGroupReport { flags, start, len_bytes } in report.block_groups {
///     println!("{flags:?}: {len_bytes} bytes at {start}");
/// }
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_mkfs::BlockGroupReport;
/// ```
/// use ubtrfs::{Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> ubtrfs::Result<()> {
/// let options = MkfsOptions { label: b"backup".to_vec(), nodesize: 32_768, ..MkfsOptions::default() };
/// Filesystem::make_on(&MemoryDevice::new(256 << 20), &options)?;
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_mkfs::MkfsOptions;
/// ```
/// use ubtrfs::{Filesystem, MemoryDevice, MkfsOptions};
///
/// # fn main() -> ubtrfs::Result<()> {
/// let report = Filesystem::make_on(&MemoryDevice::new(128 << 20), &MkfsOptions::default())?;
/// assert_eq!(report.total_bytes, 128 << 20);
/// assert!(report.bytes_used < 1 << 20 && !report.block_groups.is_empty());
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_mkfs::MkfsReport;
/// ```
/// use ubtrfs::{MkfsOptions, Uuid};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let fsid: Uuid = "8f3ba7a0-0d4c-4a8e-9d0e-2a5d3f1c6b7e".parse()?;
/// let options = MkfsOptions { fsid, ..MkfsOptions::default() };
/// # assert!(!options.fsid.is_nil());
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use uuid::Uuid;

#[cfg(feature = "import")]
mod archives {
    /// ```
    /// use ubtrfs::{ExportOptions, Filesystem};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = Filesystem::make_in_memory(128 << 20)?;
    /// fs.create("/sparse")?.set_len(1 << 30)?;
    /// let options = ExportOptions { sparse: true, ..ExportOptions::default() };
    /// let (archive, _) = fs.export("/sparse", Vec::new(), &options, &|_| {})?;
    /// assert!(archive.len() < 1 << 20);
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::ExportOptions;
    /// ```
    /// use ubtrfs::{ExportOptions, ExportReport};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", vec![1; 1000])?;
    /// let (_, report) = fs.export("/f", Vec::new(), &ExportOptions::default(), &|_| {})?;
    /// assert_eq!(report, ExportReport { bytes: 1000, failed: 0 });
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::ExportReport;
    /// ```
    /// use std::io::Cursor;
    /// use ubtrfs::{ExportOptions, ImportOptions};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "text")?;
    /// let (archive, _) = fs.export("/f", Vec::new(), &ExportOptions::default(), &|_| {})?;
    /// let options = ImportOptions { owner: Some((1000, 1000)), ..ImportOptions::default() };
    /// fs.import(Cursor::new(archive), "/copy", &options, &|_| {})?;
    /// assert_eq!(fs.metadata("/copy/f")?.uid(), 1000);
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::ImportOptions;
    /// ```
    /// use std::io::Cursor;
    /// use ubtrfs::{ExportOptions, ImportOptions, ImportReport};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "text")?;
    /// let (archive, _) = fs.export("/f", Vec::new(), &ExportOptions::default(), &|_| {})?;
    /// let report: ImportReport = fs.import(Cursor::new(archive), "/copy", &ImportOptions::default(), &|_| {})?;
    /// assert_eq!((report.files, report.bytes, report.failed), (1, 4, 0));
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::ImportReport;
    /// ```
    /// use ubtrfs::CopyOptions;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// # let scratch = tempfile::tempdir()?;
    /// # let source = scratch.path().join("source");
    /// # std::fs::write(&source, "text")?;
    /// // Every copy belongs to root, and has the time of the copy.
    /// let options = CopyOptions { owner: Some((0, 0)), keep_times: false, ..CopyOptions::default() };
    /// fs.copy_from_host(&source, "/copy", &options, &|_| {})?;
    /// assert_eq!(fs.metadata("/copy")?.uid(), 0);
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::copy::CopyOptions;
    /// ```
    /// use ubtrfs::{CopyOptions, CopyReport};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// # let scratch = tempfile::tempdir()?;
    /// # let target = scratch.path().join("target");
    /// fs.write("/f", "text")?;
    /// fs.hard_link("/f", "/g")?;
    /// let report = fs.copy_to_host("/", &target, &CopyOptions::default(), &|_| {})?;
    /// let expected = CopyReport { files: 1, hard_links: 1, directories: 1, bytes: 4, ..CopyReport::default() };
    /// assert_eq!(report, expected);
    /// # Ok(()) }
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::copy::CopyReport;
    /// ```
    /// use ubtrfs::IdRange;
    ///
    /// // The users 100000 to 165535 of a user namespace become 0 to 65535.
    /// let range = IdRange { from: 100_000, to: 0, count: 65_536 };
    /// # assert_eq!(range.from + range.count, 165_536);
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::copy::IdRange;
    /// ```
    /// use ubtrfs::{CopyOptions, IdRange, OwnerMap};
    ///
    /// // Only the user 1000 is known. Files of other users are not copied.
    /// let users = vec![IdRange { from: 1000, to: 0, count: 1 }];
    /// let options = CopyOptions { owners: OwnerMap { users, groups: Vec::new() }, ..CopyOptions::default() };
    /// # assert!(options.keep_owner);
    /// ```
    #[doc(inline)]
    pub use ubtrfs_archive::copy::OwnerMap;
}
