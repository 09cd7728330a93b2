# Firmware of the KVM probe: tries in 64-bit mode what a kernel of today needs, then counts to see how fast
# instructions run. Before each step it writes the step's letter to the debug console, so the last letter names
# the step that did not work. A step whose bit is set in `skip` is left out. The end is a byte to the exit device.
#
#   as -o firmware.o firmware.s && ld -Ttext=0xf000 --oformat=binary -o firmware.bin firmware.o

.intel_syntax noprefix

.equ EXIT, 0xf4
.equ CONSOLE, 0x402
.equ DONE, 0x2a
.equ COUNT, 20000000
.equ BASE, 0xf0000              # the last 64 KiB of the firmware are there too
.equ PML4, 0x10000
.equ PDPT, 0x11000
.equ IDT, 0x12000
.equ GDT, 0x5000
.equ TASK, 0x13000
.equ AREA, 0x14000              # what instructions save to
.equ STACK, 0x18000
.equ USER_STACK, 0x19000

.macro step number, letter, after
    test byte ptr [BASE + skip], 1 << \number
    jnz \after
    mov al, \letter
    mov dx, CONSOLE
    out dx, al
.endm

.text
.code16
.globl _start
_start:                         # at 0xf000 of the segment
    cli
    xor ax, ax
    mov es, ax
    mov si, offset descriptors
    mov di, GDT
    mov cx, offset table - descriptors
    cld
    rep movsb es:[di], cs:[si]  # to RAM: the processor marks those in use
    lgdt cs:[table]
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea            # far jump
    .long BASE + protected
    .word 8

.code32
protected:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov al, '6'
    mov dx, CONSOLE
    out dx, al
    mov dword ptr [PML4], PDPT + 7
    mov dword ptr [PDPT], PDPT + 0x9000 + 7
    mov dword ptr [PDPT + 0x9000], 0x87        # the first 2 MiB, for user mode too
    mov eax, cr4
    or eax, 0x620               # PAE, FXSAVE, SSE exceptions
    mov cr4, eax
    mov eax, PML4
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x101               # long mode, SYSCALL
    wrmsr
    mov eax, cr0
    and eax, 0xfffffffb
    or eax, 0x80000002
    mov cr0, eax
    .byte 0xea
    .long BASE + long_mode
    .word 24

    .balign 8
descriptors:
    .quad 0
    .quad 0x00cf9a000000ffff    # 8: code of 32 bits
    .quad 0x00cf92000000ffff    # 16: data
    .quad 0x00af9a000000ffff    # 24: code of 64 bits
    .quad 0x00cf92000000ffff    # 32: its data, as SYSCALL wants it
    .quad 0                     # 40
    .quad 0x00cff2000000ffff    # 48: data of user mode
    .quad 0x00affa000000ffff    # 56: its code
    .quad 0x0000890000000067 + (TASK << 16), 0  # 64
table:
    .word . - descriptors - 1
    .long GDT

.code64
long_mode:
    mov esp, STACK
    mov eax, offset breakpoint + BASE
    mov edi, IDT + 3 * 16
    mov [rdi], ax
    mov word ptr [rdi + 2], 24
    mov word ptr [rdi + 4], 0x8e00
    shr eax, 16
    mov [rdi + 6], ax
    mov qword ptr [rdi + 8], 0
    lidt [BASE + idt]
    mov qword ptr [TASK + 4], STACK
    mov eax, 64
    ltr ax

fpu:
    step 0, 'f', breakpoints
    fninit
    fxsave [AREA]
    fxrstor [AREA]
    movaps xmm0, xmm1

breakpoints:
    step 1, 'b', exchange
    int3

exchange:
    step 2, 'c', states
    mov eax, 1
    cpuid
    test ecx, 1 << 13
    jz states
    xor eax, eax
    xor edx, edx
    lock cmpxchg16b [AREA + 0x400]

states:
    step 3, 'x', user
    mov eax, 1
    cpuid
    test ecx, 1 << 26
    jz user
    mov rax, cr4
    or eax, 1 << 18
    mov cr4, rax
    xor ecx, ecx
    xgetbv
    xsetbv
    mov eax, 3
    xor edx, edx
    xsave [AREA + 0x800]
    xrstor [AREA + 0x800]

user:
    step 4, 'u', speed
    mov ecx, 0xc0000081         # STAR: segments
    xor eax, eax
    mov edx, 0x002b0018
    wrmsr
    inc ecx                     # LSTAR: where SYSCALL goes
    mov eax, offset called + BASE
    xor edx, edx
    wrmsr
    mov ecx, offset caller + BASE
    mov r11d, 2
    rex.W sysret
caller:
    syscall
called:
    mov esp, STACK

speed:
    mov al, 's'
    mov dx, CONSOLE
    out dx, al
    mov ecx, COUNT
1:  dec ecx
    jnz 1b
    mov al, DONE
    out EXIT, al
2:  hlt
    jmp 2b

breakpoint:
    iretq

    .balign 8
idt:
    .word 0xfff
    .quad IDT
    .org 0x3ff
skip:
    .byte 0
    .org 0xff0
    .byte 0xea                  # where a processor starts: to _start, below 1 MiB
    .word 0xf000, 0xf000
    .org 0x1000
