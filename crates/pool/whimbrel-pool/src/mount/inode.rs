//! Inode numbers of pool nodes and of virtual files: `.versions`, versions, and files that are not committed.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Inode {
    /// A file or folder of the pool.
    Node(u64),
    /// The folder `.versions` of a folder.
    Versions(u64),
    VersionsOf(u64),
    /// A version, by its number in the pool.
    Version(u64),
    /// A new file that is not committed yet.
    New(u64),
}

const SHIFT: u32 = 60;
const LOW: u64 = (1 << SHIFT) - 1;

impl Inode {
    pub(super) fn of(number: u64) -> Self {
        let low = number & LOW;
        match number >> SHIFT {
            1 => Self::Versions(low),
            2 => Self::VersionsOf(low),
            3 => Self::Version(low),
            4 => Self::New(low),
            _ => Self::Node(low),
        }
    }

    pub(super) fn number(self) -> u64 {
        match self {
            Self::Node(low) => low,
            Self::Versions(low) => 1 << SHIFT | low,
            Self::VersionsOf(low) => 2 << SHIFT | low,
            Self::Version(low) => 3 << SHIFT | low,
            Self::New(low) => 4 << SHIFT | low,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for inode in
            [Inode::Node(1), Inode::Versions(1), Inode::VersionsOf(9), Inode::Version(7), Inode::New(LOW)]
        {
            assert_eq!(Inode::of(inode.number()), inode);
        }
    }
}
