//! Mount options: options of the mount point are handled here, all others by `ubtrfs_fs::MountOptions`.

use anyhow::{Context, anyhow, bail};
use ubtrfs_fs::{MountOptions, SubvolumeInfo};
use ubtrfs_fuse::transport::{IdlePolling, Transport};
use ubtrfs_fuse::{MountConfig, Mounted};

use crate::common::parse_memory;

/// Options meant for mount(8), systemd or libfuse, and what the mount table says of a FUSE mount: they are ignored.
const IGNORED: &[&str] = &[
    "auto", "noauto", "user", "users", "nouser", "owner", "group", "nofail", "_netdev", "remount", "defaults",
    "silent", "loud",
];
const IGNORED_PREFIXES: &[&str] = &[
    "x-",
    "X-",
    "comment=",
    "user=",
    "uhelper=",
    "helper=",
    "subtype=",
    "loop=",
    "max_read=",
    "user_id=",
    "group_id=",
    "blksize=",
];

/// Options that SELinux takes out of the options of any filesystem.
const SELINUX: [&str; 4] = ["context=", "fscontext=", "defcontext=", "rootcontext="];

/// Whether the kernel uses SELinux. Without it, Linux refuses the options of [`SELINUX`].
fn has_selinux() -> bool {
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    filesystems.split_whitespace().any(|name| name == "selinuxfs")
}

/// Whether the options contain `remount`.
pub(super) fn is_remount(lists: &[String]) -> bool {
    has_any(lists, &["remount"])
}

/// Whether a flag is named that all mounts of a filesystem share.
pub(super) fn names_shared_flag(lists: &[String]) -> bool {
    has_any(lists, &["ro", "rw", "sync", "async", "dirsync"])
}

fn has_any(lists: &[String], names: &[&str]) -> bool {
    lists.iter().flat_map(|list| list.split(',')).any(|option| names.contains(&option))
}

/// The effects of an image on programs of this system that a mount allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// Device files and set-user-id programs of the image work, as in Linux's own mounts.
    Image,
    /// They do not work, unless the options `dev` and `suid` say so.
    Nothing,
}

/// Completes the flags of a mount that its options do not mention.
pub(super) fn distrust(lists: &[String], config: &mut MountConfig, trust: Trust) {
    let mentions =
        |flags: [&str; 2]| lists.iter().flat_map(|list| list.split(',')).any(|option| flags.contains(&option));
    if trust == Trust::Nothing {
        config.nodev |= !mentions(["dev", "nodev"]);
        config.nosuid |= !mentions(["suid", "nosuid"]);
    }
}

/// The options of an ordinary user which fusermount3 does not grant, as a warning.
pub(super) fn not_granted(lists: &[String], config: &MountConfig) -> Option<String> {
    let wanted = [("dev", config.nodev), ("suid", config.nosuid)].map(|(option, is_off)| {
        lists.iter().flat_map(|list| list.split(',')).find(|given| *given == option && !is_off)
    });
    let wanted: Vec<&str> = wanted.into_iter().flatten().collect();
    (!wanted.is_empty() && !ubtrfs_fuse::is_root()).then(|| {
        format!(
            "warning: mount option '{}' has no effect: mounts of ordinary users are always nodev,nosuid; mount as root",
            wanted.join(",")
        )
    })
}

/// Applies the `-o` arguments of a remount. Only flags that the kernel enforces can change, and options that the engine can
/// change ([`MountOptions::can_change`]), because the server is not started again. Options that the mount already has are accepted, because mount(8) passes all options of
/// /etc/fstab and of /proc/mounts. `given` are the options of the mount as the user gave them, if its server tells them.
/// `shown` is the subvolume that the mount shows, if its server tells it. Returns the options for the engine.
pub(super) fn change(
    lists: &[String],
    mounted: &mut Mounted,
    given: Option<&[String]>,
    shown: Option<&SubvolumeInfo>,
) -> anyhow::Result<Vec<String>> {
    let refused = |option: &str| {
        anyhow!(
            "mount option '{option}' cannot change while the filesystem is mounted; unmount it and mount it again with \
             that option"
        )
    };
    let (mut others, mut for_engine) = (Vec::new(), Vec::new());
    for option in lists.iter().flat_map(|list| list.split(',')).filter(|option| !option.is_empty()) {
        let is_ignored = IGNORED.contains(&option) || IGNORED_PREFIXES.iter().any(|prefix| option.starts_with(prefix));
        if set_flag(&mut mounted.config, option) || is_ignored || mounted.shows(option) {
            continue;
        }
        // Only a server that tells its options can be told to change one.
        if MountOptions::can_change(option) && given.is_some() {
            MountOptions::parse(option)?;
            for_engine.push(option.to_owned());
            continue;
        }
        // The mount may be another one than the first, for which `given` was given.
        match shown.and_then(|shown| selects(option, shown)) {
            Some(true) => {}
            Some(false) => return Err(refused(option)),
            None => others.push(option),
        }
    }
    first_change(given, &others)?.map_or(Ok(for_engine), |option| Err(refused(option)))
}

/// Whether an option selects this subvolume; `None` if it does not concern subvolumes.
fn selects(option: &str, subvolume: &SubvolumeInfo) -> Option<bool> {
    let names = |path: &[u8]| -> Vec<Vec<u8>> {
        let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
        names.map(<[u8]>::to_vec).collect()
    };
    let MountOptions { subvol, subvolid, .. } = match option.split_once('=')?.0 {
        "subvol" | "subvolid" => MountOptions::parse(option).ok()?,
        _ => return None,
    };
    let by_path = subvol.map(|path| names(&path) == names(&subvolume.path));
    by_path.or_else(|| subvolid.map(|id| id == subvolume.id))
}

/// Fails if one of these `-o` arguments has another value than the options `given` of a filesystem that is mounted already,
/// of those that all its mounts share. `dir` is one of these mounts. Sets in `config` what all mounts share.
pub(super) fn share(lists: &[String], given: &[String], dir: &str, config: &mut MountConfig) -> anyhow::Result<()> {
    let is_own = |option: &str| {
        matches!(option, "ro" | "rw" | "dev" | "nodev" | "suid" | "nosuid" | "exec" | "noexec" | "nonempty")
            || matches!(option, "symfollow" | "nosymfollow")
            || ["subvol=", "subvolid="].iter().any(|prefix| option.starts_with(prefix))
            || IGNORED.contains(&option)
            || IGNORED_PREFIXES.iter().any(|prefix| option.starts_with(prefix))
    };
    let shared: Vec<&str> = lists.iter().flat_map(|list| list.split(',')).filter(|option| !is_own(option)).collect();
    if let Some(option) = first_change(Some(given), &shared)? {
        bail!(
            "mount option '{option}' differs from the mount on {dir}, and all mounts of a filesystem share it; omit it, or \
             unmount {dir} first"
        );
    }
    let Parsed { config: first, .. } = parse(given)?;
    (config.noatime, config.dirsync, config.sync) = (first.noatime, first.dirsync, first.sync);
    Ok(())
}

/// The first of these options that changes the effect of the options `given`. Without `given`, every option counts as a
/// change.
fn first_change<'o>(given: Option<&[String]>, options: &[&'o str]) -> anyhow::Result<Option<&'o str>> {
    let Some(given) = given else { return Ok(options.first().copied()) };
    let effect = |more: &[&str]| {
        let all: Vec<String> = given.iter().cloned().chain(more.iter().map(|&option| option.to_owned())).collect();
        let Parsed { config, mut options, fuseblk } = parse(&all)?;
        // A device that is named again is not another device.
        options.devices.sort();
        options.devices.dedup();
        anyhow::Ok((config, options, fuseblk))
    };
    let now = effect(&[])?;
    if effect(options)? == now {
        return Ok(None);
    }
    for (index, &option) in options.iter().enumerate() {
        if effect(options.get(..=index).unwrap_or_default())? != now {
            return Ok(Some(option));
        }
    }
    Ok(None)
}

/// Sets a flag that the kernel enforces. Returns whether the kernel enforces the option.
fn set_flag(config: &mut MountConfig, option: &str) -> bool {
    match option {
        "ro" => config.read_only = true,
        // As in mount(8), the last of several options wins.
        "rw" => config.read_only = false,
        "dev" => config.nodev = false,
        "nodev" => config.nodev = true,
        "suid" => config.nosuid = false,
        "nosuid" => config.nosuid = true,
        "exec" => config.noexec = false,
        "noexec" => config.noexec = true,
        "atime" => config.noatime = false,
        "noatime" => config.noatime = true,
        "symfollow" => config.nosymfollow = false,
        "nosymfollow" => config.nosymfollow = true,
        "dirsync" => config.dirsync = true,
        "async" => config.sync = false,
        "sync" => config.sync = true,
        _ => return false,
    }
    true
}

/// Sets an option of the mount point that is not one of the kernel's flags. Returns `false` if `option` is any other
/// option.
fn set_own(config: &mut MountConfig, option: &str) -> bool {
    match option {
        "allow_other" => config.allow_other = true,
        "noallow_other" => config.allow_other = false,
        "default_permissions" => config.default_permissions = true,
        "nonempty" => config.nonempty = true,
        "writeback_cache" => config.writeback_cache = true,
        "nowriteback_cache" => config.writeback_cache = false,
        "xattr" => config.no_xattrs = false,
        "noxattr" => config.no_xattrs = true,
        "open" => config.no_open = false,
        "noopen" => config.no_open = true,
        "idmap" => config.idmap = true,
        "noidmap" => config.idmap = false,
        "submounts" => config.submounts = true,
        "nosubmounts" => config.submounts = false,
        "io_uring" => config.transport = Transport::Auto,
        "noio_uring" => config.transport = Transport::DevFuse,
        "idle_poll" | "idle_poll=on" => config.idle_poll = IdlePolling::On,
        "noidle_poll" | "idle_poll=off" => config.idle_poll = IdlePolling::Off,
        "idle_poll=auto" => config.idle_poll = IdlePolling::Auto,
        "loop" => {}
        _ => return false,
    }
    true
}

/// Parsed mount options.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) config: MountConfig,
    pub(super) options: MountOptions,
    /// Whether a block device should get the type `fuseblk`.
    pub(super) fuseblk: bool,
}

/// Parses all `-o` arguments.
pub(super) fn parse(lists: &[String]) -> anyhow::Result<Parsed> {
    let mut fuseblk = false;
    let mut config = MountConfig { allow_other: ubtrfs_fuse::is_root(), ..MountConfig::default() };
    let mut btrfs = Vec::new();
    let mut memory = None;
    for option in lists.iter().flat_map(|list| list.split(',')).filter(|option| !option.is_empty()) {
        if IGNORED.contains(&option) || IGNORED_PREFIXES.iter().any(|prefix| option.starts_with(prefix)) {
            continue;
        }
        if set_own(&mut config, option) || (set_flag(&mut config, option) && !concerns_btrfs(option)) {
            continue;
        }
        if let "fuseblk" | "nofuseblk" = option {
            fuseblk = option == "fuseblk";
        } else if let Some(name) = option.strip_prefix("fsname=") {
            config.fsname = name.to_owned();
        } else if SELINUX.iter().any(|name| option.starts_with(name)) {
            if !has_selinux() {
                bail!("mount option '{option}' needs SELinux, which this kernel does not use; omit it");
            }
            config.selinux.push(option.to_owned());
        } else if let Some(count) = option.strip_prefix("threads=") {
            let expected = || format!("mount option '{option}': give a number of threads from 1 to 64");
            config.nr_threads = count.parse().with_context(expected)?;
            if !(1..=64).contains(&config.nr_threads) {
                return Err(anyhow!(expected()));
            }
        } else if let Some(size) = option.strip_prefix("memory=") {
            memory = Some(parse_memory(size).map_err(|problem| anyhow!("mount option '{option}': {problem}"))?);
        } else {
            btrfs.push(option);
        }
    }
    if config.no_open && config.writeback_cache {
        bail!("noopen and writeback_cache exclude each other: a refused write would be noticed too late; omit one");
    }
    if config.no_open && config.allow_other {
        // With noopen, a user can map a file for writing without permission to write to it. The server refuses the
        // written data, but the changed pages stay in the kernel's page cache, from which all users read.
        bail!("noopen lets users map files for writing that cannot be written; mount for one user: add noallow_other");
    }
    if config.idmap && !config.checks_permissions() {
        bail!("idmap needs the kernel's permission checks: add allow_other or default_permissions");
    }
    let mut options = MountOptions::parse(&btrfs.join(","))?;
    // With noxattr, ACLs are invisible in this mount. So, as with noacl, only modes decide on access, and new files do
    // not inherit ACLs.
    options.acl &= !config.no_xattrs;
    if let Some(bytes) = memory {
        options.memory_bytes = bytes;
    }
    Ok(Parsed { config, options, fuseblk })
}

/// Whether a flag that the kernel enforces is also an option of btrfs.
fn concerns_btrfs(flag: &str) -> bool {
    matches!(flag, "ro" | "rw" | "atime" | "noatime")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (MountConfig, MountOptions) {
        let Parsed { config, options, .. } = parse(&[text.to_owned()]).unwrap();
        (config, options)
    }

    #[test]
    fn options_go_where_they_belong() {
        let (config, options) = parsed("rw,noatime,nodev,nosuid,subvol=a,commit=5,fsname=x,threads=2,memory=64M");
        assert!(config.noatime && config.nodev && config.nosuid && !config.read_only);
        assert_eq!((config.fsname.as_str(), config.nr_threads), ("x", 2));
        assert_eq!((options.commit_secs, options.memory_bytes), (5, 64 << 20));
        assert_eq!(options.subvol.as_deref(), Some(&b"a"[..]));
        for (text, read_only) in
            [("ro", true), ("rw", false), ("ro,rw", false), ("rw,noatime,ro", true), ("ro,rw,ro", true)]
        {
            let (config, options) = parsed(text);
            assert_eq!((config.read_only, options.read_only), (read_only, read_only), "{text}");
        }
        let both = parse(&["ro".to_owned(), "rw".to_owned()]).unwrap();
        assert!(!both.config.read_only && !both.options.read_only);
    }

    #[test]
    fn the_options_of_a_mount_table_are_accepted() {
        let table = ["rw,relatime,user_id=0,group_id=0,default_permissions,allow_other,blksize=4096".to_owned()];
        assert!(parse(&table).is_ok());
    }

    #[test]
    fn an_untrusted_image_gets_no_devices_and_no_set_user_id_programs() {
        let flags = |given: &str, trust| {
            let given = [given.to_owned()];
            let mut config = parse(&given).unwrap().config;
            distrust(&given, &mut config, trust);
            (config.nodev, config.nosuid)
        };
        assert_eq!(flags("noatime", Trust::Nothing), (true, true));
        assert_eq!(flags("dev", Trust::Nothing), (false, true));
        assert_eq!(flags("suid,noatime", Trust::Nothing), (true, false));
        assert_eq!(flags("suid,dev,nosuid", Trust::Nothing), (false, true), "the last one counts");
        assert_eq!(flags("noatime", Trust::Image), (false, false));
        assert_eq!(flags("nodev", Trust::Image), (true, false));
    }

    #[test]
    fn a_remount_may_repeat_the_options_of_the_mount() {
        let change = |given: &str, options: &str| {
            let options: Vec<&str> = options.split(',').collect();
            first_change(Some(&[given.to_owned()]), &options).unwrap().map(str::to_owned)
        };
        let fstab = "noatime,compress=zstd:3,commit=5,memory=64M,fsname=x,threads=2,device=/dev/x,noidle_poll";
        assert_eq!(change(fstab, "compress=zstd:3,commit=5,memory=65536K,fsname=x,threads=2,device=/dev/x"), None);
        assert_eq!(change(fstab, "commit=5,compress=zstd:4").as_deref(), Some("compress=zstd:4"));
        assert_eq!(change("compress=zstd,compress=no", "compress=zstd,compress=no"), None, "the last one counts");
        assert_eq!(change("compress=zstd,compress=no", "compress=zstd").as_deref(), Some("compress=zstd"));
        for (option, given) in [("commit=30", "noatime"), ("relatime", "acl"), ("idle_poll=auto", "rw"), ("ssd", "rw")]
        {
            assert_eq!(change(given, option), None, "{option} is the default");
        }
        for option in ["subvol=a", "device=/dev/y", "threads=3", "idle_poll", "noacl", "fuseblk"] {
            assert_eq!(change(fstab, option).as_deref(), Some(option));
        }
        assert!(first_change(Some(&[]), &["frobnicate=1"]).is_err());
        assert_eq!(first_change(None, &["commit=30"]).unwrap(), Some("commit=30"));
    }

    #[test]
    fn rings_are_used_unless_told_otherwise() {
        let transport = |text: &str| parsed(text).0.transport;
        assert_eq!(transport("noatime"), Transport::Auto);
        assert_eq!((transport("noio_uring"), transport("noio_uring,io_uring")), (Transport::DevFuse, Transport::Auto));
    }

    #[test]
    fn requests_are_spared_only_if_told() {
        let spared = |text: &str| {
            let config = parsed(text).0;
            (config.no_xattrs, config.no_open)
        };
        assert_eq!(spared("noatime"), (false, false));
        let both = spared("noallow_other,noopen,noxattr,xattr");
        assert_eq!((spared("noxattr"), both), ((true, false), (false, true)));
        let refused = |text: &str| parse(&[text.to_owned()]).unwrap_err().to_string();
        assert!(refused("noallow_other,noopen,writeback_cache").contains("exclude each other"));
        assert!(refused("allow_other,noopen").contains("add noallow_other"));
        assert_eq!((parsed("noxattr").1.acl, parsed("noatime").1.acl), (false, true));
    }

    #[test]
    fn mapped_owners_need_the_kernels_permission_checks() {
        let idmap = |text: &str| parsed(text).0.idmap;
        assert!(idmap("allow_other,idmap") && !idmap("noatime") && !idmap("allow_other,idmap,noidmap"));
        // The kernel always checks the permissions in mounts of ordinary users, so only root's mount is refused.
        match parse(&["noallow_other,idmap".to_owned()]) {
            Ok(parsed) => assert!(parsed.config.idmap && !ubtrfs_fuse::is_root()),
            Err(error) => assert!(ubtrfs_fuse::is_root() && error.to_string().contains("default_permissions")),
        }
    }

    #[test]
    fn options_of_the_mount_point_are_not_passed_to_btrfs() {
        // If one of these options were passed on, it would be refused as an unknown option of btrfs.
        let ours = "allow_other,noallow_other,default_permissions,nonempty,dev,nodev,suid,nosuid,exec,noexec,dirsync,sync,\
                    async,symfollow,nosymfollow,writeback_cache,nowriteback_cache,xattr,noxattr,open,noopen,idmap,noidmap,io_uring,noio_uring,\
                    idle_poll,noidle_poll,idle_poll=on,idle_poll=off,idle_poll=auto,fuseblk,nofuseblk,fuseblk,loop";
        assert!(parse(&[ours.to_owned()]).unwrap().fuseblk);
        assert!(!parse(&["fuseblk,nofuseblk".to_owned()]).unwrap().fuseblk);
    }

    #[test]
    fn processors_are_kept_awake_as_told() {
        assert_eq!(
            ["noatime", "idle_poll", "idle_poll,noidle_poll", "idle_poll=auto", "idle_poll=auto,idle_poll=off"]
                .map(|text| parsed(text).0.idle_poll),
            [IdlePolling::Auto, IdlePolling::On, IdlePolling::Off, IdlePolling::Auto, IdlePolling::Off]
        );
    }

    #[test]
    fn fstab_options_are_not_ours() {
        parsed("defaults,nofail,_netdev,noauto,user,x-systemd.automount,comment=x,user=me,allow_other");
    }

    #[test]
    fn options_of_selinux_are_refused_without_it() {
        for option in ["context=a:b:c:s0", "rootcontext=x"] {
            match parse(&[option.to_owned()]) {
                Ok(parsed) => assert!(has_selinux() && parsed.config.selinux == [option]),
                Err(error) => assert!(!has_selinux() && error.to_string().contains(option), "{error}"),
            }
        }
    }

    #[test]
    fn unknown_options_are_named() {
        let error = parse(&["frobnicate=1".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("frobnicate=1"), "{error}");
        assert!(parse(&["threads=0".to_owned()]).is_err());
        assert!(parse(&["idle_poll=sometimes".to_owned()]).is_err());
        let error = parse(&["memory=1".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("memory=1") && error.contains("at least 16M"), "{error}");
    }
}
