# Guest of our own for hosts whose KVM boots no stock kernel: a disk image that boots by itself.
#
# It uses plain instructions only, so that a KVM that emulates the code of a guest's kernel can run it. The BIOS
# loads it (real mode, INT 13h); then each processor runs in 64-bit mode with a timer interrupt of its own local
# APIC. Interrupts come only at one hlt, and their handler jumps behind it.
#
# Every tick each processor checks 64 pages of its region and writes 64 others, in user mode: there even a KVM
# that emulates kernels has the processor use the guest's page tables, as any other KVM does always. What a page
# must hold follows from the number of the round alone, so that a page that is one round too old or too new is
# found. Every eighth round the first processor writes a sector of the virtio disk, reads an older one back and
# checks it, and prints one line:
#
#   tick ROUND.. bad COUNT disk SECTORS life NUMBER
#
# These are the rounds of all processors, the pages and sectors that were wrong, the sectors written, and a number
# that another start of the guest would not have.
#
# A letter on the serial line, `a` to `q`, makes the first processor write each 2^(letter - 'a')th of 65,536
# pages and read the others, in user mode; then it prints `done`. Between `!` and `.` it runs no rounds at all.
#
#   as -o guest.o guest.s && ld -Ttext=0x7c00 --oformat=binary -o guest.bin guest.o

.intel_syntax noprefix

.equ PML4, 0x10000
.equ PDPT, 0x11000
.equ LOW, 0x12000               # page directory of the first GiB
.equ HIGH, 0x13000              # page directory of the fourth GiB, where the local APIC is
.equ IDT, 0x14000
.equ TASK, 0x15000               # task state: the kernel's stack for what comes from user mode
.equ QUEUE, 0x20000             # virtio queue: descriptors, available at + 0x1000, used at + 0x2000
.equ REQUEST, 0x24000           # header 16 bytes, status at + 16, sector at + 512
.equ STACKS, 0x30000            # a page for each processor, and at + 0x20000 for its user mode
.equ STATES, 0x40000            # 64 bytes for each processor: round, wrong pages, stack of the kernel
.equ REGIONS, 0x1000000         # 4 MiB for each processor
.equ REGION_PAGES, 1024
.equ WIDE, 0x2000000            # 65,536 pages, touched on request
.equ APIC, 0xfee00000
.equ VECTOR, 0x40
.equ BAD_OPCODE, 6
.equ USER_CODE, 32 + 3
.equ USER_DATA, 40 + 3
.equ TASKS, 48                  # eight of 16 bytes
.equ TICK, 625000               # 10 ms of a local APIC at 1 GHz, divided by 16
.equ FIRST_SECTOR, 64
.equ MIX_PAGE, 0x9e3779b97f4a7c15
.equ MIX_ROUND, 0xd6e8feb86659fd93

.text
.code16
.globl _start
_start:
    cli
    xor ax, ax
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov sp, 0x7c00
    mov si, offset packet
    mov ah, 0x42
    int 0x13
    jc failed
    jmp trampoline
failed:
    mov dx, 0x3f8
    mov al, '!'
    out dx, al
    hlt
    jmp failed

    .balign 4
packet:                         # 16 sectors behind this one, to 0x7e00
    .byte 16, 0
    .word 16
    .word 0x7e00, 0
    .quad 1
    .org 510
    .word 0xaa55

# Where the other processors start, in real mode. The first one comes here too.
    .org 0x400
trampoline:
    cli
    xor ax, ax
    mov ds, ax
    lgdt [table]
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea            # far jump
    .long protected
    .word 8

.code32
protected:
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    cmp dword ptr [processors], 0
    jne tables_made
    xor eax, eax
    mov edi, PML4
    mov ecx, 0x6000 / 4
    rep stosd
    mov dword ptr [PML4], PDPT + 7
    mov dword ptr [PDPT], LOW + 7
    mov dword ptr [PDPT + 24], HIGH + 3
    mov edi, LOW
    mov eax, 0x87               # present, writable, for user mode too, 2 MiB
    mov ecx, 512
map:
    mov [edi], eax
    add eax, 0x200000
    add edi, 8
    dec ecx
    jnz map
    mov dword ptr [HIGH + (APIC >> 21 & 511) * 8], APIC + 0x93  # not cached
tables_made:
    mov eax, cr4
    or eax, 0x20                # physical addresses of 64 bits
    mov cr4, eax
    mov eax, PML4
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100               # long mode
    wrmsr
    mov eax, cr0
    or eax, 0x80000000
    mov cr0, eax
    .byte 0xea
    .long long_mode
    .word 24

    .balign 8
descriptors:
    .quad 0
    .quad 0x00cf9a000000ffff    # code of 32 bits
    .quad 0x00cf92000000ffff    # data
    .quad 0x00af9a000000ffff    # code of 64 bits
    .quad 0x00affa000000ffff    # code of user mode
    .quad 0x00cff2000000ffff    # data of user mode
    .rept 8
    .quad 0x0000890000000067 + (TASK << 16), 0
    .endr
table:
    .word . - descriptors - 1
    .long descriptors

.code64
long_mode:
    mov eax, 1
    lock xadd [processors], eax
    mov r15d, eax               # number of this processor
    mov esp, r15d
    shl esp, 12
    add esp, STACKS + 0x1000
    mov r14d, r15d
    shl r14d, 6
    add r14d, STATES            # its state
    mov qword ptr [r14], 0
    mov qword ptr [r14 + 8], 0
    mov eax, r15d
    shl eax, 4
    add eax, TASKS
    ltr ax
    mov r13d, r15d
    shl r13d, 22
    add r13d, REGIONS           # its region
    test r15d, r15d
    jnz set_up
    mov eax, offset interrupted
    mov edi, IDT + VECTOR * 16
    call gate
    mov eax, offset from_user
    mov edi, IDT + BAD_OPCODE * 16
    call gate
    mov dword ptr [TASK + 4], STACKS + 0x10000
    rdtsc
    mov [life], eax
    call find_disk
    call wake_others
set_up:
    lidt [idt]
    mov al, 0xff                                # no interrupt of the old controllers
    out 0x21, al
    out 0xa1, al
    mov ebx, APIC
    mov dword ptr [rbx + 0x350], 0x10000
    mov dword ptr [rbx + 0xf0], 0x1ff           # on
    mov dword ptr [rbx + 0x3e0], 3              # divided by 16
    mov dword ptr [rbx + 0x320], 0x20000 + VECTOR
    mov dword ptr [rbx + 0x380], TICK
    call fill

main:
    cmp byte ptr [quiet], 0
    jne no_round
    mov edx, offset user_round
    call in_user
    test r15d, r15d
    jnz no_round
    mov rax, [r14]
    test al, 7
    jnz no_round
    call disk_round
    call report
no_round:
    test r15d, r15d
    jnz 1f
    call listen
1:  sti
    hlt
    jmp 1b
interrupted:
    mov rsp, [rsp + 24]
    mov ebx, APIC
    mov dword ptr [rbx + 0xb0], 0
    jmp main

# Makes the code at eax the handler of the entry at edi.
gate:
    mov [rdi], ax
    mov word ptr [rdi + 2], 24
    mov word ptr [rdi + 4], 0x8e00
    shr eax, 16
    mov [rdi + 6], ax
    mov qword ptr [rdi + 8], 0
    ret

# Runs the code at rdx in user mode. It ends with an opcode that is none.
in_user:
    mov [r14 + 16], rsp
    mov ecx, r15d
    shl ecx, 12
    add ecx, STACKS + 0x21000
    push USER_DATA
    push rcx
    push 2
    push USER_CODE
    push rdx
    iretq
from_user:                      # all processors share the stack of this exception, and none reads it
    mov rsp, [r14 + 16]
    ret

# Starts all other processors at the trampoline.
wake_others:
    mov ebx, APIC
    mov dword ptr [rbx + 0xf0], 0x1ff
    mov dword ptr [rbx + 0x300], 0xc4500        # INIT to all but this one
    call pause
    mov dword ptr [rbx + 0x300], 0xc4608        # start at page 8
    call pause
    ret
pause:
    mov ecx, 20000
2:  in al, 0x80
    dec ecx
    cmp ecx, 19000
    jne 2b
    ret

# What the page in r8 holds after the round in r9, in rax.
content:
    mov rax, MIX_PAGE
    mov rdx, r8
    add rdx, r13
    imul rax, rdx
    mov rdx, MIX_ROUND
    imul rdx, r9
    xor rax, rdx
    ret

# Address of the page in r8, in rdi.
address:
    mov rdi, r8
    shl rdi, 12
    add rdi, r13
    ret

write_page:
    call content
    call address
    mov [rdi], rax
    mov [rdi + 2048], rax
    mov [rdi + 4088], rax
    ret

# The whole region, as after the rounds before the first.
fill:
    xor r8d, r8d
3:  mov r9, r8
    shr r9, 6
    sub r9, REGION_PAGES / 64
    call write_page
    inc r8
    cmp r8, REGION_PAGES
    jne 3b
    ret

user_round:
    call round
    ud2

# Checks the 64 pages that were written half a region ago, then writes the 64 of this round.
round:
    mov r9, [r14]
    sub r9, REGION_PAGES / 128
    call group
4:  call content
    call address
    cmp [rdi], rax
    jne 5f
    cmp [rdi + 2048], rax
    jne 5f
    cmp [rdi + 4088], rax
    je 6f
5:  inc qword ptr [r14 + 8]
6:  inc r8
    test r8b, 63
    jnz 4b
    mov r9, [r14]
    call group
7:  call write_page
    inc r8
    test r8b, 63
    jnz 7b
    inc qword ptr [r14]
    ret

# First page of the round in r9, in r8.
group:
    mov r8, r9
    and r8d, REGION_PAGES / 64 - 1
    shl r8d, 6
    ret

# Port of the virtio disk: the first device of that kind on the bus.
find_disk:
    mov ebp, 0x80000000
8:  mov eax, ebp
    mov dx, 0xcf8
    out dx, eax
    mov dx, 0xcfc
    in eax, dx
    cmp eax, 0x10011af4
    je 9f
    add ebp, 0x800
    cmp ebp, 0x80010000
    jne 8b
    ret
9:  lea eax, [rbp + 4]          # ports and memory on, bus master
    mov dx, 0xcf8
    out dx, eax
    mov dx, 0xcfc
    mov eax, 7
    out dx, eax
    lea eax, [rbp + 16]
    mov dx, 0xcf8
    out dx, eax
    mov dx, 0xcfc
    in eax, dx
    and eax, 0xfffc
    mov [port], eax
    mov ebp, eax
    lea edx, [rbp + 18]
    xor eax, eax
    out dx, al                  # reset
    mov al, 1
    out dx, al
    mov al, 3
    out dx, al
    mov edi, QUEUE
    mov ecx, 0x5000 / 8
10: mov qword ptr [rdi], 0
    add edi, 8
    dec ecx
    jnz 10b
    lea edx, [rbp + 14]
    xor eax, eax
    out dx, ax                  # queue 0
    lea edx, [rbp + 8]
    mov eax, QUEUE >> 12
    out dx, eax
    lea edx, [rbp + 18]
    mov al, 7
    out dx, al
    ret

# Reads (eax 0) or writes (eax 1) the sector in r8, and waits for the end.
disk:
    mov edi, REQUEST
    mov [rdi], eax
    mov dword ptr [rdi + 4], 0
    mov [rdi + 8], r8
    mov byte ptr [rdi + 16], 0xff
    mov esi, QUEUE
    mov qword ptr [rsi], REQUEST
    mov dword ptr [rsi + 8], 16
    mov dword ptr [rsi + 12], 0x10001           # goes on at 1
    mov qword ptr [rsi + 16], REQUEST + 512
    mov dword ptr [rsi + 24], 512
    mov ecx, 0x20003                            # the device writes; goes on at 2
    test eax, eax
    jz 11f
    mov ecx, 0x20001
11: mov [rsi + 28], ecx
    mov qword ptr [rsi + 32], REQUEST + 16
    mov dword ptr [rsi + 40], 1
    mov dword ptr [rsi + 44], 2
    mov edi, QUEUE + 0x1000
    mov word ptr [rdi], 1                       # no interrupt
    movzx ecx, word ptr [rdi + 2]
    inc ecx
    mov word ptr [rdi + 2], cx                  # every place of the ring names descriptor 0
    mov edx, [port]
    add edx, 16
    xor eax, eax
    out dx, ax
    mov edi, QUEUE + 0x2000
12: mov ax, [rdi + 2]
    cmp ax, cx
    jne 12b
    cmp byte ptr [REQUEST + 16], 0
    je 13f
    inc qword ptr [r14 + 8]
13: ret

# Writes a sector and checks the one of 32 sectors ago.
disk_round:
    cmp dword ptr [port], 0
    je 17f
    mov r9, [sectors]
    call sector_of
    mov edi, REQUEST + 512
    mov ecx, 64
14: mov [rdi], rax
    add rax, rcx
    add edi, 8
    dec ecx
    jnz 14b
    mov eax, 1
    call disk
    inc qword ptr [sectors]
    mov r9, [sectors]
    sub r9, 32
    jb 17f
    xor eax, eax
    call sector_of
    push rax
    xor eax, eax
    call disk
    pop rax
    mov edi, REQUEST + 512
    mov ecx, 64
15: cmp [rdi], rax
    jne 16f
    add rax, rcx
    add edi, 8
    dec ecx
    jnz 15b
    ret
16: inc qword ptr [r14 + 8]
17: ret

# Sector of the number in r9 in r8, its first word in rax.
sector_of:
    mov r8, r9
    and r8d, 63
    add r8d, FIRST_SECTOR
    mov rax, MIX_PAGE
    imul rax, r9
    ret

report:
    mov esi, offset tick
    call text
    xor r8d, r8d
    mov r10d, STATES
    xor r11d, r11d
18: mov rax, [r10]
    call number
    add r11, [r10 + 8]
    add r10d, 64
    inc r8d
    cmp r8d, [processors]
    jne 18b
    mov esi, offset bad
    call text
    mov rax, r11
    call number
    mov esi, offset written
    call text
    mov rax, [sectors]
    call number
    mov esi, offset alive
    call text
    mov eax, [life]
    call number
    mov al, 10
    jmp letter

# Prints rax in eight digits, with a blank before.
number:
    mov r9, rax
    mov al, ' '
    call letter
    mov ecx, 8
19: rol r9d, 4
    mov eax, r9d
    and eax, 15
    add al, '0'
    cmp al, '9'
    jbe 20f
    add al, 'a' - '0' - 10
20: call letter
    dec ecx
    jnz 19b
    ret

text:
    mov al, [rsi]
    test al, al
    jz 21f
    call letter
    inc esi
    jmp text
21: ret

letter:
    mov ah, al
    mov edx, 0x3fd
22: in al, dx
    test al, 0x20
    jz 22b
    mov al, ah
    mov edx, 0x3f8
    out dx, al
    ret

listen:
    mov edx, 0x3fd
    in al, dx
    test al, 1
    jz 25f
    mov edx, 0x3f8
    in al, dx
    cmp al, '!'
    je 26f
    cmp al, '.'
    je 27f
    sub al, 'a'
    cmp al, 16
    ja 25f
    mov ecx, eax
    mov ebx, 1
    shl ebx, cl
    dec ebx                     # pages with none of these bits are written
    mov edx, offset user_touch
    call in_user
28: mov esi, offset done
    jmp text
26: mov byte ptr [quiet], 1
    jmp 28b
27: mov byte ptr [quiet], 0
25: ret

user_touch:
    xor r8d, r8d
    mov edi, WIDE
23: test r8d, ebx
    jnz 24f
    inc qword ptr [rdi]         # written at once: a page that is read first may fault twice
    jmp 29f
24: mov rax, [rdi]
29: add edi, 0x1000
    inc r8d
    cmp r8d, 65536
    jne 23b
    ud2

    .balign 64
idt:
    .word 0xfff
    .quad IDT
    .balign 8
processors: .long 0
port: .long 0
life: .long 0
quiet: .long 0
sectors: .quad 0
tick: .asciz "tick"
bad: .asciz " bad"
written: .asciz " disk"
alive: .asciz " life"
done: .asciz "done\n"
    .balign 64
    .org 0x2200
