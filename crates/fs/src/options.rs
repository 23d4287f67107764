//! Mount options, under the kernel's names.
//!
//! I1. Each option that changes behaviour takes effect, or is refused by name, except `flushoncommit`, which is only
//! parsed. Options that tune things that this engine decides itself (allocation hints, thread counts,
//! caches) are accepted and have no effect.

use std::path::PathBuf;

use ubtrfs_format::RootId;
use ubtrfs_format::item::Compression;
use ubtrfs_transaction::Rescue;

use crate::error::{Error, Result};

/// The compression of new data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressSpec {
    /// The method; never [`Compression::None`].
    pub kind: Compression,
    /// Level: zlib 1-9, zstd -15 to 15; 0 if the method has none.
    pub level: i32,
    /// Compress a file's data even if compressing its start saved no space.
    pub force: bool,
}

impl CompressSpec {
    /// zlib's default level.
    pub const ZLIB_LEVEL: i32 = 3;
    /// zstd's default level.
    pub const ZSTD_LEVEL: i32 = 3;

    /// The method at its default level.
    pub fn new(kind: Compression) -> Self {
        let level = match kind {
            Compression::Zlib => Self::ZLIB_LEVEL,
            Compression::Zstd => Self::ZSTD_LEVEL,
            Compression::Lzo | Compression::None => 0,
        };
        Self { kind, level, force: false }
    }
}

/// Rule for updating access times when files are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtimeMode {
    /// Never.
    Noatime,
    /// A read updates an access time that is not later than the last change of content or attributes, or is at least a
    /// day old.
    #[default]
    Relatime,
    /// Every read updates the access time.
    Strictatime,
}

/// Options for opening a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Open read-only.
    pub read_only: bool,
    /// Path of the subvolume to show as the root.
    pub subvol: Option<Vec<u8>>,
    /// Id of the subvolume to show as the root.
    pub subvolid: Option<RootId>,
    /// Compression of new data.
    pub compress: Option<CompressSpec>,
    /// New files are overwritten in place and have no checksums.
    pub nodatacow: bool,
    /// New files have no checksums.
    pub nodatasum: bool,
    /// Largest file that is stored inline in the tree, in bytes.
    pub max_inline: u32,
    /// Seconds between commits.
    pub commit_secs: u32,
    /// Memory for caches, delayed items and dirty data together. Default: a quarter of the machine's memory or of its
    /// control group's limit, at least 64 MiB and at most 1 GiB.
    pub memory_bytes: u64,
    /// Access times of files.
    pub atime: AtimeMode,
    /// Do not update access times of directories.
    pub nodiratime: bool,
    /// Tell devices about freed space in each commit.
    pub discard: bool,
    /// Tell devices about freed space in the background.
    pub discard_async: bool,
    /// Empty a data block group when removals bring its used part below this percentage. 0 means never.
    pub bg_reclaim_threshold: u32,
    /// Write out all dirty data at every commit. Parsed, but not read by the engine: periodic commits write all dirty
    /// data in any case.
    pub flushoncommit: bool,
    /// Further devices to open.
    pub devices: Vec<PathBuf>,
    /// Write without some of the devices, if every chunk tolerates their loss.
    pub degraded: bool,
    /// Users may delete subvolumes that they may write to.
    pub user_subvol_rm_allowed: bool,
    /// POSIX ACLs.
    pub acl: bool,
    /// fsync commits instead of writing a tree log.
    pub notreelog: bool,
    /// Do not replay a tree log, so the mount shows the last commit. [`Self::read_only`] is required.
    pub nologreplay: bool,
    /// Keep no free space tree: refused if the filesystem has one, because this engine cannot remove it.
    pub no_free_space_tree: bool,
    /// What opening a damaged filesystem passes over. [`Self::read_only`] is required, but not by
    /// [`Rescue::use_backup_root`].
    pub rescue: Rescue,
    /// Do not resume an interrupted balance.
    pub skip_balance: bool,
    /// Count each lookup, create, tmpfile and link that returns an `Attr` as a reference to the inode, which
    /// [`Fs::forget`](crate::Fs::forget) releases. For FUSE; not an option for users.
    pub track_lookups: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            subvol: None,
            subvolid: None,
            compress: None,
            nodatacow: false,
            nodatasum: false,
            max_inline: 2048,
            commit_secs: 30,
            memory_bytes: crate::mount::memory_budget::default_memory_bytes(),
            atime: AtimeMode::default(),
            nodiratime: false,
            discard: false,
            discard_async: false,
            bg_reclaim_threshold: 0,
            flushoncommit: false,
            devices: Vec::new(),
            degraded: false,
            user_subvol_rm_allowed: false,
            acl: true,
            notreelog: false,
            nologreplay: false,
            no_free_space_tree: false,
            rescue: Rescue::default(),
            skip_balance: false,
            track_lookups: false,
        }
    }
}

/// Options that take a value, or may have one.
const WITH_VALUE: &[&str] = &[
    "alloc_start",
    "bg_reclaim_threshold",
    "check_int_print_mask",
    "commit",
    "compress",
    "compress-force",
    "device",
    "discard",
    "fatal_errors",
    "fragment",
    "max_inline",
    "metadata_ratio",
    "rescue",
    "space_cache",
    "subvol",
    "subvolid",
    "thread_pool",
];

/// Options that are accepted and have no effect.
const NO_EFFECT: &[&str] = &[
    "alloc_start",
    "async",
    "autodefrag",
    "barrier",
    "check_int",
    "check_int_data",
    "check_int_print_mask",
    "clear_cache",
    "defaults",
    "dev",
    "diratime",
    "dirsync",
    "enospc_debug",
    "exec",
    "inode_cache",
    "iversion",
    "lazytime",
    "mand",
    "noautodefrag",
    "nobarrier",
    "nodev",
    "noenospc_debug",
    "noexec",
    "noflushoncommit",
    "noinode_cache",
    "noiversion",
    "nolazytime",
    "nomand",
    "nossd",
    "nossd_spread",
    "nosuid",
    "ref_verify",
    "rescan_uuid_tree",
    "ssd",
    "ssd_spread",
    "suid",
];

/// Options of the kernel that this engine refuses with a message, instead of ignoring them.
const REFUSED: &[(&str, &str)] = &[("sync", "is not supported; use fsync or `ubtrfs filesystem sync`")];

/// The options that say how new data is written. They can change while the filesystem is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewDataOptions {
    pub(crate) compress: Option<CompressSpec>,
    pub(crate) nodatacow: bool,
    pub(crate) nodatasum: bool,
}

impl MountOptions {
    pub(crate) fn data_options(&self) -> NewDataOptions {
        NewDataOptions { compress: self.compress, nodatacow: self.nodatacow, nodatasum: self.nodatasum }
    }

    /// Whether a filesystem that is open can take this option ([`crate::Fs::change_options`]).
    pub fn can_change(option: &str) -> bool {
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        matches!(name, "commit" | "compress" | "compress-force" | "nodatacow" | "datacow" | "nodatasum" | "datasum")
    }

    /// The options that can change. Applied to any options, they give these.
    pub(crate) fn changeable(&self) -> Vec<String> {
        let flags: &[&str] = match (self.nodatacow, self.nodatasum) {
            (true, _) => &["nodatacow"],
            (false, true) => &["datacow", "nodatasum"],
            (false, false) => &["datasum"],
        };
        let compress = self.compress.map_or_else(
            || "compress=no".to_owned(),
            |CompressSpec { kind, level, force }| {
                let name = if force { "compress-force" } else { "compress" };
                let level = if level == 0 { String::new() } else { format!(":{level}") };
                format!("{name}={}{level}", kind.name())
            },
        );
        let flags = flags.iter().map(|flag| (*flag).to_owned());
        [format!("commit={}", self.commit_secs)].into_iter().chain(flags).chain([compress]).collect()
    }

    /// Parses a comma-separated list of options; a later option overrides an earlier one. Fails if an option is
    /// unknown; the error contains the option.
    pub fn parse(text: &str) -> Result<Self> {
        let (options, unknown) = Self::parse_known(text)?;
        match unknown.into_iter().next() {
            None => Ok(options),
            Some(option) => Err(bad(&option, "is unknown; see the list in: ubtrfs mount --help")),
        }
    }

    /// Parses a comma-separated list and returns the unknown options, for a caller that has further options.
    pub fn parse_known(text: &str) -> Result<(Self, Vec<String>)> {
        let mut options = Self::default();
        let mut unknown = Vec::new();
        for option in text.split(',').filter(|option| !option.is_empty()) {
            if !options.apply(option)? {
                unknown.push(option.to_owned());
            }
        }
        Ok((options, unknown))
    }

    /// Applies one option; returns false if the option is unknown.
    pub fn apply(&mut self, option: &str) -> Result<bool> {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        match self.apply_named(option, name, value)? {
            true if value.is_some() && !WITH_VALUE.contains(&name) => Err(bad(option, "takes no value")),
            is_known => Ok(is_known),
        }
    }

    fn apply_named(&mut self, option: &str, name: &str, value: Option<&str>) -> Result<bool> {
        if let Some((_, problem)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            return Err(bad(option, problem));
        }
        let needs_value = || value.filter(|value| !value.is_empty()).ok_or_else(|| bad(option, "needs a value"));
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "subvol" => self.subvol = Some(needs_value()?.as_bytes().to_vec()),
            "subvolid" => {
                let id = parse_id(needs_value()?).ok_or_else(|| bad(option, "expected a subvolume id"))?;
                self.subvolid = Some(if id == 0 { RootId::FS_TREE } else { RootId(id) });
            }
            "compress" | "compress-force" => {
                self.compress = parse_compress(option, value, name == "compress-force")?;
                if self.compress.is_some() {
                    self.nodatacow = false;
                    self.nodatasum = false;
                }
            }
            "nodatacow" => {
                self.nodatacow = true;
                self.nodatasum = true;
                self.compress = None;
            }
            "datacow" => self.nodatacow = false,
            "nodatasum" => {
                self.nodatasum = true;
                self.compress = None;
            }
            "datasum" => {
                self.nodatasum = false;
                self.nodatacow = false;
            }
            "max_inline" => {
                let bytes =
                    parse_size(needs_value()?).ok_or_else(|| bad(option, "expected a size such as 2048 or 2k"))?;
                self.max_inline = u32::try_from(bytes).unwrap_or(u32::MAX);
            }
            "commit" => {
                let secs: u32 = needs_value()?.parse().map_err(|_| bad(option, "expected a number of seconds"))?;
                self.commit_secs = if secs == 0 { 30 } else { secs };
            }
            "noatime" => self.atime = AtimeMode::Noatime,
            "relatime" | "atime" | "norelatime" | "nostrictatime" => self.atime = AtimeMode::Relatime,
            "strictatime" => self.atime = AtimeMode::Strictatime,
            "nodiratime" => self.nodiratime = true,
            "discard" => match value {
                None | Some("sync") => (self.discard, self.discard_async) = (true, false),
                Some("async") => (self.discard, self.discard_async) = (false, true),
                Some(_) => return Err(bad(option, "expected discard, discard=sync or discard=async")),
            },
            "nodiscard" => (self.discard, self.discard_async) = (false, false),
            "bg_reclaim_threshold" => {
                let percent = needs_value()?.parse().ok().filter(|percent| *percent <= 100);
                self.bg_reclaim_threshold =
                    percent.ok_or_else(|| bad(option, "expected a percentage from 0 to 100"))?;
            }
            "flushoncommit" => self.flushoncommit = true,
            "device" => self.devices.push(PathBuf::from(needs_value()?)),
            "degraded" => self.degraded = true,
            "user_subvol_rm_allowed" => self.user_subvol_rm_allowed = true,
            "acl" => self.acl = true,
            "noacl" => self.acl = false,
            "skip_balance" => self.skip_balance = true,
            "notreelog" => self.notreelog = true,
            "treelog" => self.notreelog = false,
            "norecovery" | "nologreplay" => self.nologreplay = true,
            "usebackuproot" | "recovery" => self.rescue.use_backup_root = true,
            "rescue" => needs_value()?.split(':').try_for_each(|part| self.apply_rescue(option, part))?,
            "space_cache" => match value {
                None | Some("v1") => self.no_free_space_tree = true,
                Some("v2") => self.no_free_space_tree = false,
                Some(_) => return Err(bad(option, "expected space_cache, space_cache=v1 or space_cache=v2")),
            },
            "nospace_cache" => self.no_free_space_tree = true,
            "fatal_errors" => match value {
                Some("bug") => {}
                Some("panic") => return Err(bad(option, "is not supported; omit it, or give fatal_errors=bug")),
                _ => return Err(bad(option, "expected fatal_errors=bug")),
            },
            "fragment" if !matches!(value, Some("data" | "metadata" | "all")) => {
                return Err(bad(option, "expected fragment=data, fragment=metadata or fragment=all"));
            }
            "fragment" => {}
            "thread_pool" => {
                let threads = needs_value()?.parse().unwrap_or(0u32);
                if threads == 0 {
                    return Err(bad(option, "expected a number of threads, at least 1"));
                }
            }
            "metadata_ratio" => {
                needs_value()?.parse::<u32>().map_err(|_| bad(option, "expected a number"))?;
            }
            _ if NO_EFFECT.contains(&name) => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Applies a part of `rescue=PART:PART`.
    fn apply_rescue(&mut self, option: &str, part: &str) -> Result<()> {
        let rescue = &mut self.rescue;
        match part {
            "usebackuproot" => rescue.use_backup_root = true,
            "nologreplay" => self.nologreplay = true,
            "ignorebadroots" | "ibadroots" => rescue.ignore_bad_roots = true,
            "ignoredatacsums" | "idatacsums" => rescue.ignore_data_csums = true,
            "ignoremetacsums" | "imetacsums" => rescue.ignore_meta_csums = true,
            "ignoresuperflags" | "isuperflags" => rescue.ignore_super_flags = true,
            "all" => {
                self.nologreplay = true;
                *rescue = Rescue { use_backup_root: rescue.use_backup_root, ..Rescue::ALL };
            }
            _ => {
                let known = "usebackuproot, nologreplay, ignorebadroots, ignoredatacsums, ignoremetacsums, ignoresuperflags, all";
                return Err(bad(option, &format!("expected one or several of these, separated by colons: {known}")));
            }
        }
        Ok(())
    }
}

fn bad(option: &str, problem: &str) -> Error {
    Error::MountOption { option: option.to_owned(), problem: problem.to_owned() }
}

/// Parses the value of `compress[-force][=METHOD[:LEVEL]]`; `None` for `no` and `none`.
fn parse_compress(option: &str, value: Option<&str>, force: bool) -> Result<Option<CompressSpec>> {
    let expected = "expected zlib, lzo, zstd, each with a level such as zstd:3, or no";
    let (method, level) = match value.unwrap_or("zlib").split_once(':') {
        Some((method, level)) => (method, Some(level.parse::<i32>().map_err(|_| bad(option, expected))?)),
        None => (value.unwrap_or("zlib"), None),
    };
    let (kind, levels) = match method {
        "zlib" => (Compression::Zlib, 1..=9),
        "lzo" => (Compression::Lzo, 0..=0),
        "zstd" => (Compression::Zstd, -15..=15),
        "no" | "none" if level.is_none() => return Ok(None),
        _ => return Err(bad(option, expected)),
    };
    let mut spec = CompressSpec { force, ..CompressSpec::new(kind) };
    match level {
        // As in the kernel, level 0 means the default, and other levels are brought into the method's range.
        None | Some(0) => {}
        Some(level) => spec.level = level.clamp(*levels.start(), *levels.end()),
    }
    Ok(Some(spec))
}

/// A subvolume id, in decimal, or in hex after `0x`.
fn parse_id(text: &str) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok();
    }
    text.parse().ok()
}

/// Bytes with an optional suffix k, m or g.
fn parse_size(text: &str) -> Option<u64> {
    let units: [(&[char], u32); 3] = [(&['k', 'K'], 10), (&['m', 'M'], 20), (&['g', 'G'], 30)];
    let with_unit = units.iter().find_map(|(letters, shift)| Some((text.strip_suffix(*letters)?, *shift)));
    let (digits, shift) = with_unit.unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_that_can_change_are_told_so_that_they_give_themselves() {
        for text in [
            "",
            "nodatacow",
            "nodatasum",
            "nodatacow,compress=zstd,compress=no",
            "compress=zstd:-5",
            "compress-force=lzo,commit=7",
            "compress,commit=0",
        ] {
            let options = MountOptions::parse(text).unwrap();
            let told = options.changeable();
            assert!(told.iter().all(|option| MountOptions::can_change(option)), "{told:?}");
            for before in ["nodatacow,commit=99", "compress-force=zlib:9", "nodatasum"] {
                let after = MountOptions::parse(&format!("{before},{}", told.join(","))).unwrap();
                assert_eq!((after.data_options(), after.commit_secs), (options.data_options(), options.commit_secs));
            }
        }
    }

    #[test]
    fn the_kernels_options_are_understood() {
        let options = MountOptions::parse(
            "rw,noatime,compress=zstd:-5,subvol=/a/b,subvolid=0,commit=5,max_inline=1k,ssd,space_cache=v2,\
             thread_pool=4,device=/dev/a,device=/dev/b,notreelog,discard=async,degraded,noacl,flushoncommit",
        )
        .unwrap();
        assert_eq!(options.compress, Some(CompressSpec { kind: Compression::Zstd, level: -5, force: false }));
        assert_eq!(options.subvol.as_deref(), Some(&b"/a/b"[..]));
        assert_eq!(options.subvolid, Some(RootId::FS_TREE));
        assert_eq!((options.commit_secs, options.max_inline), (5, 1024));
        assert_eq!(options.devices.len(), 2);
        assert!(options.discard_async && !options.discard && options.degraded && !options.acl && options.flushoncommit);
        assert_eq!(options.atime, AtimeMode::Noatime);
    }

    #[test]
    fn values_that_linux_refuses_are_refused() {
        for wrong in [
            "thread_pool=0",
            "thread_pool=x",
            "thread_pool",
            "metadata_ratio=x",
            "metadata_ratio",
            "autodefrag=1",
            "ssd=1",
            "degraded=1",
            "nodatacow=0",
            "treelog=yes",
            "ro=1",
        ] {
            let error = MountOptions::parse(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        MountOptions::parse("thread_pool=2,metadata_ratio=0,autodefrag,ssd,compress,discard,space_cache").unwrap();
    }

    #[test]
    fn compression_methods_and_levels() {
        let compress = |text: &str| MountOptions::parse(text).map(|options| options.compress);
        assert_eq!(compress("compress").unwrap(), Some(CompressSpec::new(Compression::Zlib)));
        assert_eq!(
            compress("compress-force=lzo").unwrap().map(|spec| (spec.kind, spec.force)),
            Some((Compression::Lzo, true))
        );
        assert_eq!(compress("compress=zlib:9").unwrap().map(|spec| spec.level), Some(9));
        assert_eq!(compress("compress=zstd:15").unwrap().map(|spec| spec.level), Some(15));
        assert_eq!(compress("compress=zstd,compress=no").unwrap(), None);
        let clamped = [("zstd:19", 15), ("zstd:-40", -15), ("zlib:20", 9), ("lzo:3", 0)];
        for (method, level) in clamped {
            assert_eq!(
                compress(&format!("compress={method}")).unwrap().map(|spec| spec.level),
                Some(level),
                "{method}"
            );
        }
        for wrong in ["compress=brotli", "compress=zlib:x", "compress=zstd:"] {
            let error = compress(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn values_that_the_kernel_refuses_are_refused() {
        for option in ["fragment", "fragment=invalid", "fatal_errors", "fatal_errors=panic", "space_cache=v3"] {
            let error = MountOptions::parse(option).unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
        MountOptions::parse("fragment=all,fatal_errors=bug").unwrap();
        let keeps_no_tree = |text: &str| MountOptions::parse(text).unwrap().no_free_space_tree;
        assert!(["space_cache", "space_cache=v1", "nospace_cache"].iter().all(|text| keeps_no_tree(text)));
        assert!(!keeps_no_tree("nospace_cache,space_cache=v2") && !keeps_no_tree("clear_cache"));
    }

    #[test]
    fn nodatacow_and_compression_exclude_each_other() {
        let options = MountOptions::parse("compress=zstd,nodatacow").unwrap();
        assert!(options.nodatacow && options.nodatasum && options.compress.is_none());
        let options = MountOptions::parse("nodatacow,compress=zstd").unwrap();
        assert!(!options.nodatacow && !options.nodatasum && options.compress.is_some());
    }

    #[test]
    fn an_unknown_option_is_named() {
        for size in ["2048x", "k", "", "1kk", "-1k", "99999999999g"] {
            assert!(MountOptions::parse(&format!("max_inline={size}")).is_err(), "{size:?}");
        }
        let error = MountOptions::parse("ro,frobnicate=3").unwrap_err().to_string();
        assert!(error.contains("frobnicate=3"), "{error}");
        let (options, unknown) = MountOptions::parse_known("ro,allow_other").unwrap();
        assert!(options.read_only);
        assert_eq!(unknown, ["allow_other"]);
    }
}
